"""Optimizers on the pieces of tensors: the same updates at every layout, and the states that checkpoints hold."""

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from fake_graph import Counted
from sagekernels.adamw import BLOCK
from sagekernels.muon import orthogonalize
from sagetrain.config import RunConfig
from sagetrain.config.schema import OptimizerConfig
from sagetrain.engines.protocol import Observers
from sagetrain.engines.sharding import rows_of
from sagetrain.engines.step import Engine
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.optim import muon, weights
from sagetrain.optim.adamw import AdamW
from sagetrain.optim.build import build_optimizer, groups
from sagetrain.optim.muon import Muon
from sagetrain.optim.pieces import STEP, TensorPiece
from sagetrain.optim.states import Int8
from sagetrain.optim.weights import ChanceWeights, KahanWeights, chance
from sagetrain.stability.spikes import Verdict

MODEL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"value_embeddings": True}
STEPS = 2
RATES = {"lr_of": {"embedding": 1.5e-2, "head": 4e-2}, "lr_base_width": 16, "weight_decay_lr": 0.02}
"""Rates of their own for tensors and for weight decay."""


def config(
    stage: int, dtype: str, name: str, moments: str = "fp32", master: str = "fp32", **parallel: object
) -> RunConfig:
    optimizer = {"name": name, "lr": 1e-2, "eps": 1e-6, "moments": moments, "master": master, **RATES}
    return tiny.config(stage, dtype, model=MODEL, optimizer=optimizer, parallel={"zero_stage": stage, **parallel})


def matrices() -> list[TensorSpec]:
    """Return the matrices of a model in which q, k and v, cut by rows, have the shape of out, cut by columns."""
    cfg = tiny.config(1, model={**MODEL, "num_key_value_heads": 4, "value_embeddings": False})
    return [spec for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB) if spec.kind == "matrix"]


EXPERTS = TensorSpec("experts", (3, 64, 32), "experts", 0, "matrix", 0, matrices=6)
"""gate and up of three experts, which no rank cuts, in the shape of q, which ranks cut."""


def drawn(spec: TensorSpec, step: int) -> torch.Tensor:
    """Return a gradient (or, at step -1, weights) that does not depend on the layout."""
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{spec.name}{step}".encode())))


def part_of(piece: TensorPiece, step: int) -> torch.Tensor:
    """Return the values of `drawn` that a piece has."""
    slice = drawn(piece.spec, step).chunk(piece.slices, piece.spec.dim)[piece.slice]
    return slice.flatten()[piece.start : piece.stop].clone()


def muon_in_pieces(layouts: Sequence[tuple[int, int]], cfg: OptimizerConfig) -> list[dict[str, tuple] | None]:
    """Return the weights after some steps, for each (ranks, tensor parallel size). The first `ranks` ranks hold the
    matrices. Their pieces are ranges that cut rows, as ZeRO makes them, and the last rank holds least. The last layout
    takes rounds of one matrix a rank."""
    found = []
    for number, (ranks, tp_size) in enumerate(layouts):
        if number == len(layouts) - 1:
            muon.MUON_ROUND = 1
        group = dist.new_group(list(range(ranks)))
        rank = dist.get_rank()
        if rank >= ranks:
            found.append(None)
            continue
        slice, place, sharing = rank % tp_size, rank // tp_size, ranks // tp_size
        pieces = []
        for spec in [*matrices(), EXPERTS]:
            of = (slice, tp_size) if spec.cut == "tensor" else (0, 1)
            size = spec.size // of[1]
            edges = [min(size, n * (size // sharing + 7)) for n in range(sharing)] + [size]

            piece = TensorPiece(spec, *of, edges[place], edges[place + 1], torch.empty(0))
            pieces.append(replace(piece, weight=part_of(piece, -1)))
        optimizer = Muon(pieces, cfg, 0, group if ranks > 1 else None, cfg.weight_decay)
        for step in range(STEPS):
            optimizer.step([part_of(piece, step) for piece in pieces], 1e-2, step + 1)
        found.append({p.spec.name: (p.slice, p.start, p.weight) for p in pieces})
    return found


def joined(ranks: Sequence[dict[str, tuple]]) -> dict[str, torch.Tensor]:
    """Join the pieces that ranks hold to whole matrices."""
    whole = {}
    for spec in [*matrices(), EXPERTS]:
        slices: dict[int, list] = {}
        held = {rank[spec.name][:2]: rank[spec.name] for rank in ranks}  # Tensor-parallel ranks have the same experts.
        for slice, _, part in sorted(held.values(), key=lambda piece: piece[:2]):
            slices.setdefault(slice, []).append(part)
        shape = list(spec.shape)
        shape[spec.dim] //= len(slices)
        whole[spec.name] = torch.cat([torch.cat(slices[n]).view(shape) for n in sorted(slices)], spec.dim)
    return whole


def test_muon_has_torchs_values_and_the_same_bits_everywhere() -> None:
    layouts = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (4, 2)]
    ranks = run_distributed(muon_in_pieces, 4, layouts, OptimizerConfig(lr=1e-2))
    ours, *others = [joined([part for part in parts if part]) for parts in zip(*ranks, strict=True)]
    for layout, found in zip(layouts[1:], others, strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in ours.items()), layout
    named = {spec.name: drawn(spec, -1).requires_grad_() for spec in matrices()}
    single = {
        f"experts {n}": each.clone().requires_grad_() for n, each in enumerate(drawn(EXPERTS, -1).view(6, 32, 32))
    }
    named |= single
    theirs = torch.optim.Muon(named.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for spec in matrices():
            named[spec.name].grad = drawn(spec, step)
        for weight, gradient in zip(single.values(), drawn(EXPERTS, step).view(6, 32, 32), strict=True):
            weight.grad = gradient
        theirs.step()
    ours |= dict(zip(single, ours["experts"].view(6, 32, 32), strict=True))
    for name, weight in named.items():
        torch.testing.assert_close(ours[name], weight.detach(), rtol=0, atol=1e-6)


def test_matrices_of_one_shape_are_orthogonalized_together(monkeypatch) -> None:
    """A round has one shape, and as many matrices as fit. Owners have shapes of the same size in the same round."""
    specs, batches = matrices(), list[tuple[int, ...]]()
    pieces = [TensorPiece(spec, 0, 1, 0, spec.size, drawn(spec, -1).flatten()) for spec in specs]
    monkeypatch.setattr(
        muon, "orthogonalize", lambda x, steps: batches.append(tuple(x.shape)) or orthogonalize(x, steps)
    )
    for most, expected in ((2**25, [(4, 48, 32), (2, 32, 48), (8, 32, 32)]), (3 * 48 * 32, None)):
        monkeypatch.setattr(muon, "MUON_ROUND", most)
        batches.clear()
        Muon(pieces, OptimizerConfig(lr=1e-2), 0, None, 0.1).step([drawn(spec, 0).flatten() for spec in specs], 1e-2, 1)
        assert sum(batch[0] for batch in batches) == len(specs)
        assert sorted(batches) == sorted(expected) if expected else all(math.prod(batch) <= most for batch in batches)


def test_muon_replays_what_orthogonalizes_a_shape(monkeypatch) -> None:
    """A batch is recorded behind the first one of its shape, and replayed for all later ones, with the same bits."""
    monkeypatch.setattr(muon, "MUON_ROUND", 3 * 48 * 32)
    specs, ends = matrices(), []
    for record in (None, Counted()):
        pieces = [TensorPiece(spec, 0, 1, 0, spec.size, drawn(spec, -1).flatten()) for spec in specs]
        optimizer = Muon(pieces, OptimizerConfig(lr=1e-2), 0, None, 0.1)
        optimizer._record = record
        for step in range(3):
            optimizer.step([drawn(spec, step).flatten() for spec in specs], 1e-2, step + 1)
        ends.append([piece.weight for piece in pieces])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    assert record and record.recorded == len(optimizer._recordings) < len(optimizer._rounds)
    assert record.replayed == 3 * len(optimizer._rounds) - record.recorded


def with_experts(name: str, **keys: Any) -> RunConfig:
    """Build the configuration of a model with a mixture. AdamW updates k, if Muon updates matrices."""
    model = {**MODEL, "experts": {"number": 4, "per_token": 2, "ffn_size": 16, "dense_layers": 1}}
    muon = {"adamw_matrices": ["k"], **keys.pop("muon", {})}
    return tiny.config(1, model=model, optimizer={"name": name, "muon": muon, **keys})


def updated(cfg: RunConfig) -> dict[TensorSpec, tuple[torch.Tensor, torch.Tensor]]:
    """Return all tensors that an optimizer updates, before and after an update at the peak of its schedule."""
    specs = {spec.name: spec for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB)}
    found = {}
    for group in groups(specs.values(), cfg):
        weights = {specs[name]: drawn(specs[name], -1).flatten() for name in group.names}
        pieces = [TensorPiece(spec, 0, 1, 0, spec.size, weight) for spec, weight in weights.items()]
        gradients = [drawn(spec, 0).flatten() for spec in weights]
        build_optimizer(cfg, group, pieces, None).step(gradients, cfg.optimizer.lr, 1)
        found |= {spec: (drawn(spec, -1).flatten(), weight) for spec, weight in weights.items()}
    assert sorted(spec.name for spec in found) == sorted(spec.name for spec in specs.values() if spec.kind != "state")
    return found


def kind_of(spec: TensorSpec) -> str:
    """Return the key of optimizer.lr_of for a tensor."""
    return {"embedding.weight": "embedding", "head.weight": "head"}.get(spec.name, spec.kind)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_kind_of_tensor_has_its_learning_rate(name: str) -> None:
    """A tensor moves as it would if its rate were optimizer.lr. Rates are powers of two, so that bits are equal."""
    rates = {"embedding": 2**-5, "head": 2**-6, "matrix": 2**-7, "gain": 2**-8, "router": 2**-9}
    alone = {kind: updated(with_experts(name, lr=rate)) for kind, rate in rates.items()}
    for spec, (_, found) in updated(with_experts(name, lr=2**-10, lr_of=rates)).items():
        same = [kind for kind, others in alone.items() if torch.equal(found, others[spec][1])]
        assert same == [kind_of(spec)], spec.name


@pytest.mark.parametrize(("name", "muon", "factor"), [
    ("adamw", {}, 2**-2), ("muon", {}, 2**-1), ("muon", {"adjust_lr": "original"}, 1.0),
])  # fmt: skip
def test_rates_of_a_base_width_are_scaled_to_the_model(name: str, muon: dict, factor: float) -> None:
    """The model is four times as wide as the base. AdamW's matrices, head and routers have a quarter of the rate, and
    Muon's matrices half of it."""
    lr, base = 2**-6, MODEL["hidden_size"] // 4
    at = {scale: updated(with_experts(name, lr=lr * scale, muon=muon)) for scale in (1.0, 0.5, 0.25)}
    for spec, (_, found) in updated(with_experts(name, lr=lr, muon=muon, lr_base_width=base)).items():
        kept = kind_of(spec) in ("embedding", "gain")
        by_muon = spec.kind == "matrix" and "k" not in spec.name.split(".")
        expected = 1.0 if kept else factor if by_muon else 2**-2
        assert [scale for scale, others in at.items() if torch.equal(found, others[spec][1])] == [expected], spec.name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_may_have_a_rate_of_its_own(name: str) -> None:
    """A step takes weight_decay x weight_decay_lr of a weight, whatever the rate of its tensor is."""
    keys: dict[str, Any] = {"lr": 2**-6, "lr_of": {"embedding": 2**-5, "matrix": 2**-7}, "lr_base_width": 8}
    plain = updated(with_experts(name, weight_decay=0.0, **keys))
    for spec, (before, found) in updated(with_experts(name, weight_decay=0.5, weight_decay_lr=2**-4, **keys)).items():
        taken = before * (0.5 * 2**-4) if kind_of(spec) in ("embedding", "head", "matrix") else torch.zeros(spec.size)
        torch.testing.assert_close(plain[spec][1] - found, taken, rtol=0, atol=1e-6, msg=spec.name)


def losses_of(root: str, cases: list[tuple[int, int, int, tuple, dict]]) -> list[tuple[tuple, list[float]]]:
    """Return the losses and norms of three steps by (dtype, optimizer, moments), for each (tp, cp, stage, those, more
    keys of `parallel`). A checkpoint is saved after two steps, and a fresh engine repeats the third from it, which has
    the same samples as the first one. A refused step before it changes nothing."""
    found = []
    for number, (tp_size, cp_size, stage, how, more) in enumerate(cases):
        cfg, joined = config(stage, *how, **more), tiny.join(tp_size, cp_size)
        engine = tiny.engine(cfg, joined)
        first = [tiny.global_step(engine, step) for step in range(2)]
        folder = Path(root) / f"{dist.get_world_size()}-{number}"
        tiny.save(folder, joined, tiny.run_state(2), engine.owned())
        before = bits(engine)
        refused = tiny.global_step(engine, 9, observers=Observers(judge=lambda metrics: Verdict(apply=False)))
        assert not refused.applied and bits(engine) == before
        later = tiny.global_step(engine, 0)
        again = tiny.engine(cfg, joined, seed=11)
        tiny.load(again, folder, 2)
        assert tiny.global_step(again, 0).loss == later.loss and bits(again) == bits(engine), (tp_size, stage, how)
        found.append((how, [x for r in (*first, later) for x in (r.loss, r.grad_norm)]))
    return found


def bits(engine: Engine) -> dict[tuple[str, str], bytes]:
    """Return all weights and states that this rank keeps."""
    return {(kept.name, kind): kept.read(kind).numpy().tobytes() for kept in engine.owned() for kind in kept.kinds}


MUON = ("fp32", "muon", "fp32"), ("bf16", "muon", "fp32")
NARROW = ("bf16", "adamw", "int8", "bf16_chance"), ("bf16", "muon", "fp32", "bf16_kahan")
SMALL = ("bf16", "muon", "int8"), ("bf16", "muon", "bf16"), ("bf16", "adamw", "int8"), ("fp32", "adamw", "bf16")


def whole_and_pieces(dim: int) -> tuple[TensorPiece, list[tuple[TensorPiece, torch.Tensor]]]:
    """A tensor as one piece, and as four: ranges of two slices. Each of those with the places that it holds."""
    spec = TensorSpec("w", (64, 96), "tensor", dim, "matrix", 0)
    index, found = torch.arange(spec.size).view(spec.shape), []
    for slice, part in enumerate(index.chunk(2, dim)):
        flat = part.flatten()
        for a, b in ((0, 1001), (1001, len(flat))):
            found.append((TensorPiece(spec, slice, 2, a, b, torch.zeros(b - a, dtype=torch.bfloat16)), flat[a:b]))
    return TensorPiece(spec, 0, 1, 0, spec.size, torch.zeros(spec.size, dtype=torch.bfloat16)), found


@pytest.mark.parametrize("dim", [0, 1])
def test_rounding_by_chance_is_fair_and_the_same_in_pieces(dim: int, monkeypatch) -> None:
    """Random bits are made for a bounded number of values at once."""
    values = torch.randn(64 * 96, generator=torch.Generator().manual_seed(0))
    whole, pieces = whole_and_pieces(dim)
    of_whole, at_once = ChanceWeights(whole, 7), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(weights, "_AT_ONCE", 1000)
        patched.setattr(weights, "chance", lambda places, *key: at_once.append(len(places)) or chance(places, *key))
        of_whole.write(values, 0, 3)
    assert at_once == [1000] * 6 + [144]
    for piece, held in pieces:
        part = ChanceWeights(piece, 7)
        part.write(values[held], 0, 3)
        assert torch.equal(part.read(), of_whole.read()[held])
    seen = {3: of_whole.read()}
    for update in range(400):
        of_whole.write(values, 0, update)
        seen[update] = of_whole.read()
        of_whole.write(seen[update], 0, update)
        assert torch.equal(of_whole.read(), seen[update])  # what bf16 holds is not rounded
    step = values.abs() * 2**-7  # bf16 has 7 bits behind the first
    assert all(((found - values).abs() <= step).all() for found in seen.values())
    assert ((torch.stack([*seen.values()]).mean(0) - values) / step).abs().mean() < 0.03
    other = ChanceWeights(whole, 8)
    other.write(values, 0, 3)
    assert (other.read() != seen[3]).float().mean() > 0.2  # another seed, and so for another update
    assert (seen[4] != seen[3]).float().mean() > 0.2


def test_masters_in_two_parts_hold_what_they_read() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values[:1000] = 1 + 2.0**-9 - 2.0 ** -torch.arange(10, 24).repeat(72)[:1000]  # just below the middle of two numbers
    weights = KahanWeights(TensorPiece(tiny.spec(len(values)), 0, 1, 0, len(values), values.bfloat16()))
    weights.write(values)
    read, parts = weights.read(), (weights._values.clone(), weights._rest.clone())
    assert ((read - values).abs() <= values.abs() * 2**-17).all()
    weights.write(read)
    assert torch.equal(weights._values, parts[0]) and torch.equal(weights._rest, parts[1])


def far_from(master: str, target: torch.Tensor, moments: str = "fp32") -> float:
    """Return how far AdamW ends from the optimum of a noisy square, with updates below half a step of bf16."""
    cfg = OptimizerConfig(lr=2e-3, moments=moments, master=master)
    start = (target + 1).bfloat16()
    memory = start.float() if master == "fp32" else start
    piece = TensorPiece(tiny.spec(len(target)), 0, 1, 0, len(target), memory)
    optimizer = AdamW([piece], cfg, 5, 0.0)
    for step in range(1, 1001):
        noise = torch.randn(len(target), generator=torch.Generator().manual_seed(step)) * 0.5
        optimizer.step([optimizer.weights[0].read() - target + noise], 2e-3 * (1 - step / 1001), step)
    return (optimizer.weights[0].read() - target).square().mean().sqrt().item()


def test_small_updates_are_not_lost_in_bf16() -> None:
    target = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exact = far_from("fp32", target)
    assert exact < 0.3
    for master, moments in (("bf16_chance", "fp32"), ("bf16_kahan", "fp32"), ("bf16_chance", "int8")):
        assert far_from(master, target, moments) < 1.05 * exact, (master, moments)


@pytest.mark.parametrize("signed", [True, False])
def test_moments_in_8_bits_are_read_and_written_alike(signed: bool) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 0, 100_003)
    values[5_000:6_000], values[7_000:7_300] = 0.0, 1e-40  # There are blocks of zeros, and of subnormal numbers.
    values = values if signed else values.square()
    state = Int8(values, signed)
    assert state.read().eq(0).all()
    state.write(values)
    read, codes = state.read(), (state._codes.clone(), state._largest.clone())
    assert (read - values).abs().sum() < 0.02 * values.abs().sum()
    assert read.unflatten(0, (-1, 1))[values.abs().argmax()] == values[values.abs().argmax()]
    for start in range(0, len(values), STEP):
        state.write(read[start : start + STEP], start)
    assert torch.equal(codes[0], state._codes) and torch.equal(codes[1], state._largest)
    assert torch.equal(state.read(STEP, 3 * STEP + 1), read[STEP : 3 * STEP + 1])
    for inside in (1, 100, 300):  # A block has one scale.
        with pytest.raises(ValueError, match=f"begins at value {inside}, which is no multiple of 256"):
            state.write(read[:256], inside)
        with pytest.raises(ValueError, match=f"begins at value {inside},"):
            state.read(inside)


def test_matrices_of_experts_share_no_block_of_moments() -> None:
    """Muon takes the matrices of a tensor one by one. Experts are whole on a rank (sharding.rows_of), and their sizes
    are multiples of 16 (rules/experts.py), so that each matrix begins with a block at every number of ranks."""
    for ranks, hidden, inner in itertools.product((1, 2, 3, 5, 8), (16, 48, 80), (16, 112)):
        spec = TensorSpec("experts", (6, 2 * inner, hidden), "experts", 0, "matrix", 0, matrices=12)
        for rank in range(ranks):
            rows = rows_of(6, ranks, rank)
            start, stop = (row * 2 * inner * hidden for row in (rows.start, rows.stop))
            every = muon._matrices(0, TensorPiece(spec, 0, 1, start, stop, torch.empty(stop - start)))
            held = [each.first for each in every if len(each.piece.weight)]
            assert held == [number * inner * hidden for number in range(2 * (rows.stop - rows.start))]
            assert not any(first % BLOCK for first in held)


def test_small_gradients_beside_large_ones_move_weights_little() -> None:
    """Gradients of one block have seven decades. A mean of squares that were rounded to zero would divide by eps."""
    optimizers = []
    for moments in ("fp32", "int8"):
        piece = TensorPiece(tiny.spec(2048), 0, 1, 0, 2048, torch.zeros(2048))
        optimizers.append(AdamW([piece], OptimizerConfig(lr=1e-3, moments=moments), 0, 0.0))
    draw, largest = torch.Generator().manual_seed(1), [0.0, 0.0]
    for step in range(1, 100):
        gradient = torch.randn(8, 256, generator=draw) * torch.logspace(-2, -9, 256)
        for number, optimizer in enumerate(optimizers):
            before = optimizer.weights[0].read().clone()
            optimizer.step([gradient.flatten()], 1e-3, step)
            largest[number] = max(largest[number], (optimizer.weights[0].read() - before).abs().max().item())
    assert largest[1] < 2 * largest[0]


def test_engines_learn_alike_at_every_layout_and_resume(tmp_path) -> None:
    """The cases are Muon, and both optimizers with small moments. A resumed engine has the same bits."""
    full, half = MUON
    fsdp, hybrid, deepspeed = {"engine": "fsdp"}, {"engine": "fsdp", "shard_size": 2}, {"engine": "deepspeed"}
    worlds = {
        1: [(1, 1, 0, full, fsdp), *((1, 1, 1, how, fsdp) for how in (half, *SMALL, *NARROW))],
        2: [
            (1, 1, 0, full, deepspeed),
            *((1, 1, stage, half, engine) for stage, engine in ((2, deepspeed), (3, fsdp))),
            *((1, 1, stage, how, fsdp) for stage, how in enumerate(SMALL)),
            (1, 1, 2, SMALL[0], deepspeed),
            (1, 2, 1, full, fsdp),
        ],
        4: [
            (2, 1, 3, full, fsdp),
            *((2, 1, stage, half, engine) for stage, engine in ((1, fsdp), (2, deepspeed))),
            *((tp_size, 1, 1, how, fsdp) for tp_size, how in zip((1, 2), NARROW, strict=True)),
            (1, 1, 1, half, hybrid),
        ],
    }
    rows: dict[tuple, list] = {}
    for world, cases in worlds.items():
        for rank in run_distributed(losses_of, world, str(tmp_path), cases):
            for how, numbers in rank:
                rows.setdefault(how, []).append(numbers)
    for how, numbers in rows.items():
        of_all, near = torch.tensor(numbers), 2e-3 if how == full else 3e-2
        assert of_all[0, 4] < of_all[0, 0] - 0.4  # The third step has the samples of the first one.
        assert (of_all - of_all[0]).abs().amax() < near, how
