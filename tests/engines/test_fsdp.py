"""The engine on torch's FSDP2 takes the same steps as one process and as DeepSpeed, at every stage and layout."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import late_copies
import tiny
from distributed import run_distributed
from runs import check_killed, check_scored
from sagetrain.config import RunConfig
from sagetrain.config.errors import TrainingError
from sagetrain.config.layout import Layout
from sagetrain.costs.host_memory import host_memory_per_rank
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import Batch
from sagetrain.engines import fsdp, kept_weights
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.engines.sharding import Unit
from sagetrain.engines.step import Engine
from sagetrain.parallel import layers
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.linear_errors import LinearErrors
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.quant_noise import QuantizationProbe
from sagetrain.stability.spikes import Verdict

# Four ranks get unequal shards of 34 rows, and one of them gets nothing of the 6 gains of QK-norm.
UNEVEN = {"num_attention_heads": 4, "hidden_size": 34, "head_dim": 6}
TIED = {"tie_embeddings": True, "value_embeddings": True}
# With an eps of 1e-8, Adam takes a full step of lr on a gradient that is nothing but rounding.
OPTIMIZER = {"clip_grad": 0.5, "eps": 1e-6}
ON_HOST = {"activation_checkpointing": "full", "activation_offload": True}
SPREAD = {"sequence_parallel": True, "tensor_parallel_overlap": "on"}


def config(stage: int, dtype: str = "fp32", parallel: dict | None = None, **sections: dict) -> RunConfig:
    parallel = {"engine": "fsdp", "zero_stage": stage, **(parallel or {})}
    sections = {"optimizer": OPTIMIZER, **sections, "model": UNEVEN | sections.get("model", {})}
    return tiny.config(stage, dtype, parallel=parallel, **sections)


def compiled(cfg: RunConfig, groups: ParallelGroups) -> Engine:
    model = tiny.model(cfg, groups)
    if cfg.training.activation_checkpointing == "none":
        tiny.compile_first_rank(model, "eager")  # It makes the same graphs.
    else:
        tiny.compile_first_rank(model, ranks=groups.tp_size)
    return build_engine(tiny.on(cfg, groups), model)


# -- losses at every layout --------------------------------------------------------------------------------------------

CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "FSDP 4, ZeRO 0": ((1, 1), {"stage": 0}),
    "FSDP 4, ZeRO 1, tied": ((1, 1), {"stage": 1, "model": TIED}),
    "FSDP 4, ZeRO 3, recomputed": ((1, 1), {"stage": 3, "training": {"activation_checkpointing": "full"}}),
    "hybrid 2 x 2, ZeRO 2, activations on the host": (
        (1, 1), {"stage": 2, "parallel": {"shard_size": 2}, "training": ON_HOST},
    ),
    "TP 2 x context 2, activations on the host, ZeRO 3": ((2, 2), {"stage": 3, "training": ON_HOST}),
    "TP 2 x FSDP 2, halves, ZeRO 1": ((2, 1), {"stage": 1, "parallel": SPREAD}),
    "TP 2 x FSDP 2, halves, tied, ZeRO 3": ((2, 1), {"stage": 3, "parallel": SPREAD, "model": TIED}),
    "TP 2 x hybrid 2 x 1, ZeRO 0": ((2, 1), {"stage": 0}),
    "TP 2 x context 2, selective, ZeRO 3": (
        (2, 2), {"stage": 3, "training": {"activation_checkpointing": "selective"}},
    ),
    "optimizer in host memory, ZeRO 1": ((1, 1), {"stage": 1, "parallel": {"offload": "optimizer"}}),
    "hybrid, optimizer in host memory, ZeRO 2": (
        (1, 1), {"stage": 2, "parallel": {"shard_size": 2, "offload": "optimizer"}},
    ),
    "TP 2, all in host memory, tied, ZeRO 3": (
        (2, 1), {"stage": 3, "parallel": {"offload": "all"}, "model": TIED},
    ),
}  # fmt: skip


def steps_of(engine: Engine) -> list[tuple[float, float]]:
    """Return the losses and norms of steps of 4 and of 8 sequences, with an evaluation between them."""
    steps = [tiny.global_step(engine, 0)]
    held_out = tiny.evaluation(engine, ["web", "code"])
    steps.append(tiny.global_step(engine, 1, sequences=8))
    numbers = [(result.loss, result.grad_norm) for result in steps]
    return [*numbers, (held_out["valid/loss"], held_out["valid/code/loss"])]


def losses_of(cases: Sequence[str], engine: str = "fsdp") -> dict[str, list[tuple[float, float]]]:
    found, groups = {}, {}
    for name in cases:
        sizes, how = CASES[name]
        if dist.get_world_size() == 1:
            sizes, how = (1, 1), {**how, "stage": 0, "parallel": {}}
        groups[sizes] = groups.get(sizes) or tiny.join(*sizes)
        cfg = config(**{**how, "parallel": {**how.get("parallel", {}), "engine": engine}})
        found[name] = steps_of(tiny.engine(cfg, groups[sizes]))
    return found


def test_losses_do_not_depend_on_the_layout_or_on_the_engine() -> None:
    names = list(CASES)
    expected = run_distributed(losses_of, 1, names[:2], "deepspeed")[0]
    untied, tied = (torch.tensor(expected[name]) for name in names[:2])
    assert (untied[:, 1] > 0.5).any()  # Some norms are above the limit, so clipping is at work.
    for rank in run_distributed(losses_of, 4, names):
        for name, numbers in rank.items():
            loss, norm = (torch.tensor(numbers) - (tied if "tied" in name else untied)).abs().amax(0).tolist()
            assert loss < 1e-5, f"{name}: losses differ by {loss}"
            assert norm < 1e-4, f"{name}: gradient norms differ by {norm}"


# -- bits --------------------------------------------------------------------------------------------------------------


def by_hand(cfg: RunConfig, groups: ParallelGroups, steps: int) -> dict[str, torch.Tensor]:
    """Return the fp32 masters after steps without clipping, for a bf16 model whose gradients are added up in fp32."""
    model = tiny.model(
        cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"engine": "deepspeed"})}), groups
    )
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    decayed = [p for name, p in masters.items() if model.specs[name].decays]
    plain = [p for name, p in masters.items() if not model.specs[name].decays]
    parts = [{"params": decayed, "weight_decay": cfg.optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, lr=1e-2, betas=cfg.optimizer.betas, eps=cfg.optimizer.eps, foreach=False)
    for step in range(steps):
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        tokens = torch.randint(0, tiny.VOCAB, (6, tiny.SEQ + 1), generator=torch.Generator().manual_seed(step))
        own = tokens[groups.dp_rank :: groups.dp_size]
        for row in own:
            (model(row[None, :-1], row[None, 1:]) / len(own)).backward()
            for name, p in model.named_parameters():
                sums[name] += p.grad
                p.grad = None
        for name, total in sums.items():
            dist.all_reduce(total, group=groups.replica_group)
            masters[name].grad = total / groups.num_replicas
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return masters


def bits(stages: Sequence[int]) -> list[tuple[int, str, bool]]:
    """Return, by stage and tensor, whether the masters after two steps equal those made by hand."""
    groups, found = tiny.join(2), []
    for stage in stages:
        cfg = config(stage, "bf16", {"sequence_parallel": True}, optimizer={"clip_grad": 0.0})
        engine, expected = tiny.engine(cfg, groups), by_hand(cfg, groups, 2)
        for step in range(2):
            tiny.global_step(engine, step, sequences=6)  # three micro-steps, or six of a single replica
        for owned in engine.owned():
            same = torch.equal(owned.weight, expected[owned.name].detach().view(-1)[owned.start : owned.stop])
            found.append((stage, owned.name, same))
        # The model is called by itself, as probes do, after a pass without hooks.
        tokens = torch.arange(tiny.SEQ)[None]
        made = engine.logits(Batch(tokens, tokens, None, None, None, sample_ids=[]))
        found.append((stage, "logits", bool(made.isfinite().all())))
    return found


def test_bf16_weights_with_fp32_masters_equal_a_loop_by_hand() -> None:
    """Each micro-step is reduced by itself at ZeRO 2 and 3, which adds the same numbers in another order."""
    for ranks, stages in ((4, [0, 1]), (2, [1])):  # Two ranks are a single replica, which has nothing to reduce.
        for found in run_distributed(bits, ranks, stages):
            assert [case for case in found if not case[-1]] == []


def moved_by_clipped(limits: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return the limit, the norm of the gradient and that of the update for a step at each limit of the norm."""
    groups, found = tiny.join(1), list[tuple[float, float, float]]()
    tiny.SGD.use()
    for limit in limits:
        engine = tiny.engine(config(1, optimizer={"clip_grad": limit}), groups)
        before = [owned.read("weight").clone() for owned in engine.owned()]
        norm = tiny.global_step(engine, 0).grad_norm
        square = sum(
            (x - owned.read("weight")).double().square().sum() for x, owned in zip(before, engine.owned(), strict=True)
        )
        dist.all_reduce(square)
        found.append((limit, norm, square.sqrt().item() / 1e-2))
    return found


def test_an_update_has_the_norm_of_the_clipped_gradient() -> None:
    """Losses under AdamW would not show it: its updates do not depend on the scale of gradients."""
    for rank in run_distributed(moved_by_clipped, 2, [0.125, 100.0, 0.0]):
        for limit, norm, moved in rank:
            assert moved == pytest.approx(limit if 0 < limit < norm else norm, rel=1e-4), limit


def refused(cases: Sequence[tuple[int, dict]]) -> list[tuple[bool, bool, bool]]:
    """Return three answers for each stage and section: whether a refused step leaves every bit, whether a step with a
    gradient that is not finite does, and whether later steps are those of a run without these steps."""
    groups, found = tiny.join(1), []
    for stage, parallel in cases:
        cfg = config(stage, "bf16", parallel)
        engine, other = tiny.engine(cfg, groups), tiny.engine(cfg, groups)
        for each in (engine, other):
            tiny.global_step(each, 0)
        before = tiny.state_of(engine)
        tiny.global_step(engine, 1, observers=Observers(judge=lambda metrics: Verdict(apply=False)))
        left = all(map(torch.equal, before, tiny.state_of(engine)))
        for owned in engine.owned(lambda spec: spec.name == "final_norm.gain"):
            kept = owned.weight.clone()
            owned.weight.fill_(torch.inf)
            engine.state_changed()
            assert not tiny.global_step(engine, 1).applied
            owned.weight.copy_(kept)
            engine.state_changed()
        skipped = all(map(torch.equal, before, tiny.state_of(engine)))
        again = [tiny.global_step(each, 2).loss for each in (engine, other)]
        found.append((left, skipped, again[0] == again[1]))
        dict(engine.model.named_parameters())["final_norm.gain"].requires_grad_(False)
        with pytest.raises(TrainingError, match=r"^final_norm\.gain has no gradient in this step .* the loss of"):
            tiny.global_step(engine, 3)
    return found


def test_a_step_left_out_leaves_every_bit_and_no_gradient() -> None:
    cases = [(1, {"offload": "optimizer"}), (2, {"shard_size": 2}), (3, {"offload": "all"})]
    for rank in run_distributed(refused, 4, cases):
        assert rank == [(True, True, True)] * len(cases)


# -- state in the host's memory ----------------------------------------------------------------------------------------


def numbers(cases: Sequence[tuple[int, dict]], late: bool) -> list[list[tuple[float, float]]]:
    """Return losses and norms of steps of one, two and four micro-steps for each stage and section, with copies to the
    host that are made at once or when somebody waits for them."""
    groups, found = tiny.join(1), []
    for stage, parallel in cases:
        engine = tiny.engine(config(stage, parallel=parallel), groups)
        with late_copies.played(engine) if late else nullcontext():
            steps = [tiny.global_step(engine, step, sequences) for step, sequences in enumerate((2, 4, 8))]
        found.append([(result.loss, result.grad_norm) for result in steps])
    return found


def test_gradients_are_read_when_they_are_on_the_host() -> None:
    optimizer = {"offload": "optimizer"}
    cases = [(1, optimizer), (2, optimizer), (2, {"shard_size": 1, **optimizer}), (3, {"offload": "all"})]
    at_once, late = (run_distributed(numbers, 2, cases, late)[0] for late in (False, True))
    assert late == at_once


# -- units of parameters -----------------------------------------------------------------------------------------------


def updates_by_units(stages: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return by how much a step moves the last block where both pairs of ranks have the same tokens. First it has the
    ranks of the other blocks, then its pair's alone, which divide its gradients' sum by 2, and by 4."""
    groups, found = tiny.join(1), list[list[torch.Tensor]]()
    tiny.SGD.use()
    plain, tokens = fsdp.units, torch.arange(2 * tiny.SEQ + 2).view(2, -1) % tiny.VOCAB

    def units(*how: Any, divisor: int) -> list[Unit]:
        *others, last = plain(*how)
        mesh = DeviceMesh.from_group(last.ranks.shards, "cpu", mesh_dim_names=("shard",))
        return [*others, last._replace(ranks=replace(last.ranks, mesh=mesh, copies=None), divisor=divisor)]

    def weights(engine: Engine) -> torch.Tensor:
        of_block = engine.owned(lambda spec: spec.name.startswith("blocks.1.mlp."))
        return torch.cat([owned.read("weight").clone() for owned in of_block])

    for stage in stages:
        cfg, updates = config(stage, parallel={"shard_size": 2}, optimizer={"clip_grad": 0}), list[torch.Tensor]()
        for changes in (nullcontext(), *(patch.object(fsdp, "units", partial(units, divisor=n)) for n in (2, 4))):
            with changes:
                engine = tiny.engine(cfg, groups)
            row, before = tokens[groups.dp_rank % 2, None], weights(engine)
            engine.step([Batch(row[:, :-1], row[:, 1:], None, None, None, sample_ids=[])] * 2, 2, 1.0)
            updates.append(weights(engine) - before)
        found.append(updates)
    return found


def test_a_unit_has_ranks_and_a_divisor_of_its_own() -> None:
    """So experts can have other ranks than the blocks around them."""
    for updates in run_distributed(updates_by_units, 4, [1, 3]):
        for plain, own, half in updates:
            assert plain.abs().max() > 1e-3
            assert torch.equal(own, plain)
            torch.testing.assert_close(2 * half, plain, rtol=1e-5, atol=1e-7)


# -- collectives -------------------------------------------------------------------------------------------------------


def noted(engine: fsdp.FsdpEngine, held: list[int]) -> None:
    """Let the engine note before each backward pass how many gradients FSDP would add to."""
    backward = engine.backward

    def noting(loss: torch.Tensor, last: bool) -> None:
        held.append(sum(parameter.grad is not None for parameter in engine._sums._parameters.values()))
        backward(loss, last)

    engine.backward = noting


def collectives(cases: Sequence[tuple[int, str, int | None]]) -> dict[tuple[int, str, int | None], dict[str, int]]:
    """Count the gathers, the reduce-scatters and the forward passes with hooks of a step of four micro-steps, by stage,
    parallel.offload and parallel.shard_size, and the gradients that FSDP holds at the begin of later backward passes.
    What the engine holds is what `plan` says of it."""
    found = {}
    for stage, offload, size in cases:
        shape = {"hidden_size": 32, "head_dim": 8, "tie_embeddings": stage == 2}
        cfg = config(stage, "bf16", {"offload": offload, "shard_size": size}, model=shape)
        engine = tiny.engine(cfg, tiny.join(1))
        planned = {item.name: item.bytes for item in memory_per_rank(cfg, 2, tiny.VOCAB)}
        of_host = {item.name: item.bytes for item in host_memory_per_rank(cfg, 2, tiny.VOCAB)}
        kept = sum(owned.read(kind).nbytes for owned in engine.owned() for kind in owned.kinds)
        if offload == "none":
            assert kept == planned["optimizer"] and not of_host
        else:
            assert kept == of_host["moments"] * 3 / 2 == of_host["checkpoint"]
            assert kept / 3 <= of_host["masters"] < 2 * kept / 3
        if stage < 3:
            assert sum(weight.nbytes for weight in engine.gathered().values()) == planned["weights"]
            assert tiny.generates_the_same(cfg, engine)
        if stage == 3:
            whole = config(stage, "bf16", parallel={"shard_size": 1})
            assert tiny.generates_the_same(whole, tiny.engine(whole, tiny.join(1)))
        engine.weights_changed()
        tiny.global_step(engine, 0)
        noted(engine, held := [])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            tiny.global_step(engine, 1, sequences=8)
        # profiler.events() would spend four times as long as everything else here on the tree of all operators.
        names = [event.name() for event in profiler.profiler.kineto_results.events()]
        found[stage, offload, size] = {
            kind: sum(f"FSDP::{kind} " in f"{name} " for name in names)
            for kind in ("post_backward_reduce", "pre_forward")
        } | {
            "held": max(held),
            "gathers": names.count("gloo:all_gather"),
            "reduced": names.count("c10d::_reduce_scatter_base_"),
        }
        # `plan` subtracts the host's time for the hooks by the same rule.
        layout = Layout.of(cfg, engine.groups.topology.world_size)
        assert found[stage, offload, size]["pre_forward"] == (0 if layout.hooks == "never" else 12)
    return found


def test_zero_1_gathers_and_reduces_once_a_step() -> None:
    """The groups are two blocks and the rest. At ZeRO 3 the rest stays gathered to the end of the step. At ZeRO 1, and
    at ZeRO 2 and 3 without state in the host's memory and copies of shards, no micro-step has FSDP's hooks. FSDP holds
    no gradient in the host's memory, where it would wait for every copy and every sum."""
    cases = [
        (1, "none", None),
        (1, "optimizer", None),
        (2, "none", None),
        (2, "none", 2),
        (3, "none", None),
        (3, "all", None),
    ]
    found = run_distributed(collectives, 2, cases)[0]
    once = {"gathers": 3, "reduced": 3, "post_backward_reduce": 0, "pre_forward": 0, "held": 0}
    assert found[1, "none", None] == found[1, "optimizer", None] == once
    assert found[2, "none", None] == {**once, "reduced": 12}
    assert found[2, "none", 2].pop("held") > 0 == found[3, "all", None]["held"]
    assert found[2, "none", 2] == {"gathers": 3, "reduced": 12, "post_backward_reduce": 12, "pre_forward": 12}
    # Two blocks stay where they are until the update.
    assert found[3, "none", None] == {**once, "gathers": 1 + 2, "reduced": 12}
    assert found[3, "all", None]["post_backward_reduce"] == found[3, "all", None]["pre_forward"] == 12
    assert found[3, "all", None]["gathers"] > 12


# -- checkpoints -------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "deepspeed 1": ((1, 1), 1, {"engine": "deepspeed"}),
    "deepspeed TP 2, 2": ((2, 1), 2, {"engine": "deepspeed"}),
    "fsdp 1": ((1, 1), 1, {}),
    "fsdp TP 2, 0": ((2, 1), 0, {}),
    "fsdp hybrid, 3": ((1, 1), 3, {"shard_size": 2}),
    "fsdp context, 2": ((1, 2), 2, {}),
    "fsdp in host memory, 1": ((1, 1), 1, {"offload": "optimizer"}),
}


def saved_and_continued(root: str) -> dict[str, tuple[dict[str, list], dict[tuple[str, str], list]]]:
    groups = {sizes: tiny.join(*sizes) for sizes, *_ in LAYOUTS.values()}
    return {dtype: in_dtype(f"{root}/{dtype}", dtype, groups) for dtype in ("fp32", "bf16")}


def in_dtype(root: str, dtype: str, groups: dict) -> tuple[dict[str, list], dict[tuple[str, str], list]]:
    """Return what tiny.saved_and_continued does. In fp32 there is ZeRO 1 without tensor or context parallelism alone:
    how an engine keeps masters depends on the dtype, and what is cut of a tensor does not."""
    layouts = [name for name, (sizes, stage, _) in LAYOUTS.items() if dtype == "bf16" or (*sizes, stage) == (1, 1, 1)]

    def engine(name: str, seed: int) -> Engine:
        sizes, stage, parallel = LAYOUTS[name]
        return tiny.engine(config(stage, dtype, parallel, model={"value_embeddings": True}), groups[sizes], seed)

    return tiny.saved_and_continued(Path(root), layouts, engine, lambda name: "fsdp" in name)


@pytest.fixture(scope="module")
def continued(tmp_path_factory) -> dict:
    return run_distributed(saved_and_continued, 4, str(tmp_path_factory.mktemp("checkpoints")))[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_checkpoints_of_one_engine_continue_in_the_other(continued, dtype: str) -> None:
    later, resumed = continued[dtype]
    for (name, other), losses in resumed.items():
        if name == other:
            assert losses == later[name], name
        else:
            assert losses == pytest.approx(later[name], rel=1e-5 if dtype == "fp32" else 2e-3), (name, other)


# -- observers, and what is made of weights ----------------------------------------------------------------------------

EIGHT = {"precision": "fp8"}
SHAPE = {"hidden_size": 64, "ffn_hidden_size": 96, "head_dim": 16, "num_key_value_heads": 4}


def observed(layouts: Sequence[tuple[int, int, str, str]]) -> list[dict[str, float]]:
    """Return the metrics of noise, both probes and layer norms for a second step, at each (tp_size, stage, engine,
    backend)."""
    found = []
    for tp_size, stage, engine_name, backend in layouts:
        groups = tiny.join(tp_size)
        cfg = config(stage, parallel={"engine": engine_name}, model=SHAPE, linear=EIGHT, tokens_per_step={"tokens": 64})
        engine = compiled(cfg, groups) if backend else tiny.engine(cfg, groups)
        model, leaves, device = engine.model, engine.leaves(), engine.device
        observers = Observers(
            noise=GradientNoise(leaves, model.specs.values(), groups, device),
            probes=[
                LinearErrors(model, range(2), leaves),
                QuantizationProbe(model, model.functions[0], leaves),
            ],
            layer_norms=True,
        )
        tiny.global_step(engine, 0)
        measured = tiny.global_step(engine, 1, sequences=6, observers=observers)
        again = tiny.global_step(engine, 2)
        found.append(
            measured.metrics | {f"layer {k}": v for k, v in measured.layer_norms.items()} | {"next": again.loss}
        )
    return found


def test_probes_and_norms_equal_those_of_the_other_engine() -> None:
    """A single rank is a single replica, whose last pass of a step has no hooks."""
    many = [(1, 1, "deepspeed", ""), *((1, stage, "fsdp", "") for stage in (0, 1, 3)), (1, 3, "fsdp", "aot_eager")]
    for ranks, layouts in ((2, many), (1, many[:3])):
        first, *others = run_distributed(observed, ranks, layouts)[0]
        assert any(name.startswith("quant/") for name in first) and "noise/0/small" in first
        for layout, found in zip(layouts[1:], others, strict=True):
            assert found.keys() == first.keys(), (ranks, layout)
            for name, value in first.items():
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-9), (ranks, layout, name)


def kept(tp_size: int) -> list[list[float]]:
    """Return the losses with 8-bit weights made once a step, made anew at every use, and at ZeRO 3. The first list ends
    with the number of times that its engine made the weights of a block."""
    groups, found, made = tiny.join(tp_size), [], []
    for stage, keep in ((1, layers.keep_weights), (1, lambda block: None), (3, layers.keep_weights)):
        cfg = config(stage, "bf16", {"sequence_parallel": True}, model=SHAPE, linear=EIGHT)
        engine = tiny.engine(cfg, groups)
        with patch.object(kept_weights, "keep_weights", lambda block, keep=keep: made.append(keep(block))):
            found.append([loss for loss, _ in steps_of(engine)])
        found[0].extend([len(made)] if len(found) == 1 else [])
    return found


def test_weights_in_8_bits_are_rounded_once_a_step() -> None:
    for (*once, made), anew, resharded in run_distributed(kept, 4, 2):
        assert once == anew
        # At ZeRO 3 micro-steps are added up in another order.
        assert resharded == pytest.approx(anew, rel=2e-3)
        # Two blocks, two steps: the second step finds the weights that the evaluation has made.
        assert made == 2 * 2


def graphs(cases: Sequence[tuple[int, str]]) -> list[tuple[list, int]]:
    """Return the numbers of two steps and the number of graphs, for each stage and way to recompute. At stage 0
    nothing is compiled."""
    found, groups, counters = [], tiny.join(1), torch._dynamo.utils.counters
    for stage, again in cases:
        torch._dynamo.reset()
        counters.clear()
        cfg = config(stage, training={"activation_checkpointing": again})
        engine = compiled(cfg, groups) if stage else tiny.engine(cfg, groups)
        numbers = [(r.loss, r.grad_norm) for r in (tiny.global_step(engine, step, 6) for step in range(2))]
        found.append((numbers, counters["stats"]["unique_graphs"]))
    return found


def test_compiled_blocks_share_a_graph() -> None:
    """Collectives of tensor parallelism in graphs are those of model/test_parallel.py."""
    cases = [(0, "none"), (3, "selective")]
    (plain, _), *found = run_distributed(graphs, 2, cases)[0]
    for case, (numbers, count) in zip(cases[1:], found, strict=True):
        assert torch.allclose(torch.tensor(numbers), torch.tensor(plain), rtol=2e-5), case
        assert count <= 2, case  # The norms outside of blocks have a graph of their own.


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, corpus) -> None:
    """The run has two ranks of the deepspeed launcher, ZeRO 3 in bf16 with everything in host memory, and two or four
    micro-steps. `sagetrain eval` scores the trained model."""
    sections = {
        "data": {"micro_batch_size": 2},
        "parallel": {"engine": "fsdp", "zero_stage": 3, "offload": "all"},
        "training": {"dtype": "bf16"},
        "evaluation": {"every_tokens": 2560},
    }
    check_killed(tmp_path, corpus, 12, 6, sections, launcher="deepspeed")
    settings = json.loads((tmp_path / "cut/fsdp.json").read_text())
    assert settings["reshard_after_forward"] is True and settings["offload"] == "all"
    check_scored(tmp_path / "whole", "--attention", "sdpa")
