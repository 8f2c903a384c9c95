"""A mixture of experts takes the same steps at every layout as in one process: losses, gradients, norms, loads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tiny
from distributed import run_distributed
from sagekernels.grouped import Rows, plan_rows
from sagekernels.grouped_matmul import GroupedLowBit
from sagetrain.config import RunConfig
from sagetrain.config.layout import Layout
from sagetrain.data.batch import Batch
from sagetrain.engines import fsdp
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers, every
from sagetrain.engines.step import Engine
from sagetrain.model import dispatch
from sagetrain.model.placement import place
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.parallel.layers import linear_layers
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.spikes import Verdict

BALANCE = {"bias_rate": 0.01, "aux_weight": 0.5, "z_weight": 0.02}
EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 16, "shared": 1, "dense_layers": 1, "balance": BALANCE}
SPREAD = {"sequence_parallel": True, "tensor_parallel_overlap": "on"}
PIPELINE = {"pipeline_parallel_size": 2}
OWN = {"sequence_parallel": True, "tensor_parallel_overlap": "off"}
WIDE = {"ffn_hidden_size": 64, "experts": {**EXPERTS, "ffn_size": 32}}  # wide enough for 8 bits


def config(stage: int, parallel: dict | None = None, dtype: str = "fp32", **sections: dict) -> RunConfig:
    parallel = {"engine": "fsdp", "zero_stage": stage, "tensor_parallel_overlap": "off", **(parallel or {})}
    model = {"num_layers": 2, "num_attention_heads": 4, "experts": EXPERTS, **sections.pop("model", {})}
    optimizer = {"clip_grad": 0.5, "eps": 1e-6, **sections.pop("optimizer", {})}
    return tiny.config(stage, dtype, parallel=parallel, model=model, optimizer=optimizer, **sections)


THREE = {"num_layers": 3}
"""Two blocks with a mixture behind the dense one, where the order of blocks matters. One block shows all else."""
BIASED = {**THREE, "conventions": "gpt_oss", "qkv_bias": True}
"""Routers, experts and attention with biases."""

GEMMA = {**THREE, "conventions": "gemma", "activation": "geglu"}

# Tensor-, context-, pipeline- and expert-parallel sizes of four ranks, and the rest of the configuration.
CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "ZeRO 1": ((1, 1, 1, 1), {"stage": 1}),
    "hybrid 2 x 2, ZeRO 2, offload": (
        (1, 1, 1, 1), {"stage": 2, "parallel": {"shard_size": 2, "offload": "optimizer"}}
    ),
    "ZeRO 3, selective": (
        (1, 1, 1, 1), {"stage": 3, "training": {"activation_checkpointing": "selective"}, "model": BIASED}
    ),
    "TP 2, halves, ZeRO 3": ((2, 1, 1, 1), {"stage": 3, "parallel": SPREAD}),
    "TP 2, halves, recomputed, ZeRO 0": (
        (2, 1, 1, 1), {
            "stage": 0, "parallel": SPREAD, "training": {"activation_checkpointing": 2}, "model": BIASED,
        },
    ),
    "TP 2 x context 2, attention recomputed, ZeRO 2": (
        (2, 2, 1, 1), {
            "stage": 2, "parallel": OWN, "training": {"activation_checkpointing": "attention"},
            "model": {"norms": "sandwich"},
        },
    ),
    "experts 2 x context 2, hybrid 2 x 2, recomputed, ZeRO 1, offload": (
        (1, 2, 1, 2), {
            "stage": 1, "parallel": {"expert_parallel_size": 2, "shard_size": 2, "offload": "optimizer"},
            "training": {"activation_checkpointing": "full"},
        },
    ),
    "experts 2, compiled, ZeRO 0": (
        (1, 1, 1, 2), {"stage": 0, "parallel": {"expert_parallel_size": 2}, "model": THREE}
    ),
    "experts 2 x TP 2, halves, ZeRO 2": (
        (2, 1, 1, 2), {
            "stage": 2, "parallel": {**SPREAD, "expert_parallel_size": 2}, "model": {"activation": "geglu"},
        },
    ),
    "experts 4, compiled, ZeRO 3": (
        (1, 1, 1, 4), {"stage": 3, "parallel": {"expert_parallel_size": 4}, "model": BIASED}
    ),
    "experts 4, selective, ZeRO 3": (
        (1, 1, 1, 4), {
            "stage": 3, "parallel": {"expert_parallel_size": 4},
            "training": {"activation_checkpointing": "selective"},
        },
    ),
    "experts 2 x TP 2, halves, recomputed, ZeRO 3, offload": (
        (2, 1, 1, 2), {
            "stage": 3, "parallel": {**SPREAD, "expert_parallel_size": 2, "offload": "all"},
            "training": {"activation_checkpointing": "full"},
        },
    ),
    "experts 4 x TP 4, selective, ZeRO 1": (
        (4, 1, 1, 4), {
            "stage": 1, "parallel": {**OWN, "expert_parallel_size": 4},
            "training": {"activation_checkpointing": "selective"},
        },
    ),
    "experts 2 x PP 2, ZeRO 3": (
        (1, 1, 2, 2), {"stage": 3, "parallel": {**PIPELINE, "expert_parallel_size": 2}, "model": BIASED}
    ),
    "PP 2 in chunks, copies, ZeRO 2": (
        (1, 1, 2, 1), {
            "stage": 2, "parallel": {**PIPELINE, "pipeline_chunks": 2, "shard_size": 1},
            "model": {"num_layers": 4, "norms": "post"},
        },
    ),
    "PP 2 x TP 2, halves, ZeRO 0": ((2, 1, 2, 1), {"stage": 0, "parallel": {**SPREAD, **PIPELINE}, "model": GEMMA}),
}  # fmt: skip

IN_8_BITS = [
    "ZeRO 3, selective",
    "TP 2, halves, ZeRO 3",
    "TP 2, halves, recomputed, ZeRO 0",
    "TP 2 x context 2, attention recomputed, ZeRO 2",
    "experts 2 x context 2, hybrid 2 x 2, recomputed, ZeRO 1, offload",
    "experts 2 x TP 2, halves, ZeRO 2",
    "experts 4 x TP 4, selective, ZeRO 1",
    "PP 2 in chunks, copies, ZeRO 2",
]
"""The layouts whose first step is also taken in 8 bits: each axis, and each engine of weights."""


def batches(groups: ParallelGroups, step: int, sequences: int = 4) -> tuple[list[Batch], int]:
    """Return this rank's micro-batches of a step of so many sequences, in which a fourth of the tokens does not count,
    and how many tokens count in all."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, tiny.VOCAB, (sequences, tiny.SEQ + 1), generator=draw)
    masked = torch.rand(sequences, tiny.SEQ, generator=draw) < 0.25
    own = zip(tiny.batches_of(tokens, groups), masked[groups.dp_rank :: groups.dp_size], strict=True)
    return [replace(batch, labels=batch.labels.masked_fill(mask, -1)) for batch, mask in own], int((~masked).sum())


def take(
    engine: Engine, steps: range, sequences: int = 4, measured: Callable[[TensorSpec], bool] = every
) -> list[dict[str, Any]]:
    """Take steps. Return the numbers of each, of every other one with those of observers.

    Args:
        measured: chooses the tensors whose gradients' noise is measured.
    """
    found = []
    for step in steps:
        own, counted = batches(engine.groups, step, sequences)
        specs = [spec for spec in engine.model.every_spec.values() if measured(spec)]
        noise = GradientNoise(engine.leaves(), specs, engine.groups, engine.device) if step % 2 else None
        observers = Observers(noise=noise, layer_norms=step % 2 == 1)
        result = tiny.taken(engine, own, 0.05, observers, counted)
        numbers = {**result.metrics, **{f"layer {layer}": norm for layer, norm in result.layer_norms.items()}}
        found.append({"loss": result.loss, "norm": result.grad_norm, **numbers})
    return found


Pieces = dict[str, list[tuple[int, int, torch.Tensor]]]


def pieces(engine: Engine) -> Pieces:
    """Return what counts of each tensor on this rank: its slice, where it begins, and its values."""
    found: Pieces = {}
    for owned in engine.owned():
        number, _, _, counted = place(owned.spec, engine.groups)
        if counted and not owned.twin and owned.stop > owned.start:
            found[owned.name] = [(number, owned.start, owned.read("weight").clone())]
    return found


def joined(every: Sequence[Pieces], specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors of the pieces of all ranks."""
    found = {}
    for name, spec in specs.items():
        mine = sorted(piece for of_rank in every for piece in of_rank.get(name, []))
        slices: dict[int, list[torch.Tensor]] = {}
        for number, _, values in mine:
            slices.setdefault(number, []).append(values)
        shape = list(spec.shape)
        if len(slices) > 1:
            shape[spec.dim] //= len(slices)
        found[name] = torch.cat([torch.cat(parts).view(shape) for parts in slices.values()], spec.dim or 0)
    return found


def sections_of(name: str, groups: ParallelGroups) -> dict[str, Any]:
    """Return the configuration of a case. In one process it has the model alone."""
    sections = {"model": {}, **CASES[name][1]}
    return sections if groups.topology.world_size > 1 else {"stage": 0, "model": sections["model"]}


def model_of(name: str) -> dict[str, Any]:
    model: dict[str, Any] = CASES[name][1].get("model", {})
    return model


def kind_of(name: str) -> str:
    """Return the key of what the model of a case does in one process."""
    return str(model_of(name))


def trained(
    name: str, groups: ParallelGroups, measured: Callable[[TensorSpec], bool] = every
) -> tuple[list[dict[str, Any]], Pieces]:
    """Return the numbers of two steps at a layout, and what counts of the weights behind them."""
    alone, how = groups.topology.world_size == 1, sections_of(name, groups)
    with patch.object(fsdp, "build_optimizer", lambda run, group, pieces, ranks: tiny.SGD(pieces)):
        cfg = tiny.on(config(**how), groups)
        model = tiny.model(cfg, groups)
        if "compiled" in name and not alone:
            # FSDP2's hooks of ZeRO 3 break graphs, which "eager" has as well and makes in half the time.
            backend = "eager" if cfg.parallel.zero_stage == 3 else "aot_eager"
            hooks = Layout.of(cfg, groups.topology.world_size).calls_experts
            tiny.compile_first_rank(model, backend, inner_hooks=hooks)
        engine = build_engine(cfg, model)
    numbers = take(engine, range(1))
    if not alone and "compiled" not in name:  # These tokens are no load.
        engine.evaluate(batches(groups, 9)[0][:1])
    return numbers + take(engine, range(1, 2), measured=measured), pieces(engine)


def first_step(name: str, groups: ParallelGroups, precision: str = "int8") -> tuple[dict[str, Any], Pieces]:
    """Return the numbers of one step with all linear layers in 8 bits, and what counts of the weights behind it."""
    how = sections_of(name, groups)
    how["model"] = how["model"] | WIDE
    with patch.object(fsdp, "build_optimizer", lambda run, group, pieces, ranks: tiny.SGD(pieces)):
        engine = tiny.engine(config(**how, linear={"precision": precision}), groups)
    low = [type(layer.matmul).__name__ for layer in linear_layers(engine.model)]
    assert set(low) == {"Matmul", "GroupedMatmul"} if precision == "bf16" else {"LowBit", "GroupedLowBit"}, low
    return take(engine, range(1))[0], pieces(engine)


def in_one_process() -> dict[str, Any]:
    groups = tiny.join(1)
    with patch.object(fsdp, "build_optimizer", lambda run, group, pieces, ranks: tiny.SGD(pieces)):
        balanced, plain = ([moved(groups, masked, aux) for masked in (False, True)] for aux in (0.5, 0.0))
    losses = [{name: one[name] - other[name] for name in one} for one, other in zip(balanced, plain, strict=True)]
    cases, spread, eight = (
        {kind_of(name): name for name in names}
        for names in (CASES, [name for name in CASES if "experts" in name], IN_8_BITS)
    )
    first = {
        kind: {precision: first_step(name, groups, precision) for precision in ("bf16", "int8")}
        for kind, name in eight.items()
    }
    # Where ranks have experts between them, the noise is that of everything else.
    dense = {kind: trained(name, groups, lambda spec: spec.cut != "experts")[0] for kind, name in spread.items()}
    whole = {kind: trained(name, groups) for kind, name in cases.items()}
    return {"trained": whole, "dense": dense, "losses": losses, "first": first}


def in_four(root: str) -> dict[str, Any]:
    groups: dict[tuple[int, ...], ParallelGroups] = {}
    for sizes, _ in CASES.values():
        groups[sizes] = groups.get(sizes) or tiny.join(*sizes)
    found = {"trained": {name: trained(name, groups[CASES[name][0]]) for name in CASES}}
    found["first"] = {name: first_step(name, groups[CASES[name][0]]) for name in IN_8_BITS}
    for size in (2, 4):
        with patch.dict(GroupedLowBit.check.__globals__, PIECE=size * tiny.SEQ):
            found.setdefault("room", {})[size] = lacking_room(groups[1, 1, 1, size])
    return found | {dtype: saved_and_continued(f"{root}/{dtype}", dtype, groups) for dtype in HOW}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_distributed(in_one_process, 1)[0]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict[str, Any]]:
    return run_distributed(in_four, 4, str(tmp_path_factory.mktemp("mixture")))


def test_steps_equal_those_of_one_process(alone, four) -> None:
    """A step moves weights by their gradients, so weights show the gradients of all tensors."""
    for name in CASES:
        cfg = config(0, model=model_of(name))
        specs = {spec.name: spec for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB)}
        numbers, mine = alone["trained"][kind_of(name)]
        assert numbers[0]["norm"] > 0.5  # Clipping is at work.
        expected = joined([mine], specs)
        for rank in four:
            right = alone["dense"][kind_of(name)] if "experts" in name else numbers
            for made, wanted in zip(rank["trained"][name][0], right, strict=True):
                assert made.keys() == wanted.keys(), name
                for number, value in wanted.items():
                    if "halves" in name and number.endswith("/activation"):
                        continue  # It is that of the first half.
                    how = {"abs": 0.0, "rel": 0.0} if number.startswith("moe/") else {"rel": 1e-4, "abs": 1e-7}
                    assert made[number] == pytest.approx(value, **how), (name, number)
        weights = joined([rank["trained"][name][1] for rank in four], specs)
        for tensor, wanted in expected.items():
            exact = specs[tensor].kind == "state"
            torch.testing.assert_close(
                weights[tensor], wanted, rtol=0, atol=0 if exact else 1e-6, msg=lambda s, n=(name, tensor): f"{n}: {s}"
            )


def test_steps_in_8_bits_are_as_exact_as_in_one_process(alone, four) -> None:
    """The step is the same where ranks have whole sequences and whole matrices, as codes are. Elsewhere rows
    or columns share other scales, and what the step moves is as far from 32 bits as in one process."""
    for name in IN_8_BITS:
        cfg = config(0, model={**model_of(name), **WIDE})
        specs = {spec.name: spec for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB)}
        (exact, wide), (numbers, low) = (alone["first"][kind_of(name)][precision] for precision in ("bf16", "int8"))
        truth, expected = (joined([each], specs) for each in (wide, low))
        assert exact["loss"] != numbers["loss"]
        tensor, context, _, experts = CASES[name][0]
        same = tensor == context == experts == 1
        for rank in four:
            found = rank["first"][name][0]
            for number in ("loss", "norm"):
                limit = 1e-6 if same else 2e-3
                assert found[number] == pytest.approx(numbers[number], rel=limit), (name, number)
        weights = joined([rank["first"][name][1] for rank in four], specs)
        for key, wanted in expected.items():
            kind = specs[key].kind
            if same or kind == "state":
                torch.testing.assert_close(
                    weights[key], wanted, rtol=0, atol=1e-6, msg=lambda s, n=(name, key): f"{n}: {s}"
                )
            elif kind in ("matrix", "router"):
                error, usual = ((each - truth[key]).norm().item() for each in (weights[key], wanted))
                assert 0 < error < 1.2 * usual, (name, key, error, usual)


# -- checkpoints, and steps that are left out --------------------------------------------------------------------------

HOW: dict[str, tuple[list[str], dict[str, Any]]] = {
    "fp32": (["ZeRO 1", "experts 2 x PP 2, ZeRO 3"], {"model": BIASED}),
    "bf16": (
        ["TP 2, halves, ZeRO 3", "experts 2 x context 2, hybrid 2 x 2, recomputed, ZeRO 1, offload"],
        {"dtype": "bf16", "optimizer": {"name": "muon"}},
    ),
    "fp8": (
        ["experts 2 x TP 2, halves, ZeRO 2", "TP 2, halves, ZeRO 3"],
        {"dtype": "bf16", "linear": {"precision": "fp8"}, "optimizer": {"moments": "int8", "master": "bf16_chance"}},
    ),
    "kahan": (["ZeRO 1"], {"dtype": "bf16", "optimizer": {"master": "bf16_kahan"}}),
}
"""The layouts that write checkpoints, each read by the next one as well, and the configuration, by dtype."""


def lacking_room(groups: ParallelGroups) -> dict[float, Any]:
    """Return the numbers of a step that is refused for lack of room and taken again, and those of a step with room for
    all rows, with the state behind both. INT8 adds up no more than the tokens of all ranks, whatever the room is."""
    found, (own, counted) = {}, batches(groups, 0)
    for room in (1.0, groups.ep_size):
        most: list[int] = []
        parallel = {"expert_parallel_size": groups.ep_size, "expert_room": room}
        engine = tiny.engine(config(1, parallel, linear={"precision": "int8"}), groups)
        before, refused = tiny.state_of(engine), 0
        while (result := engine.step(own, len(own), 0.05, counted=counted)).room:
            refused += 1
            assert all(map(torch.equal, before, tiny.state_of(engine))), "a step without room has changed something"
        assert result.applied and (refused > 0) == (room == 1)
        plan = partial(planned, most)
        with patch.object(dispatch, "plan_rows", plan):
            valid = engine.evaluate(own[:1])
        # Rows of a rank have the same mean by both ways: those of its tokens.
        mean = EXPERTS["per_token"] * own[0].tokens.numel()
        assert max(most) <= engine.room.times * mean, "an evaluation has more rows than there is room for"
        found[room] = result.metrics | valid, tiny.state_of(engine)
    return found


def planned(most: list[int], choices: torch.Tensor, *how: Any) -> Rows:
    """Note the number of rows that there is memory for."""
    rows = plan_rows(choices, *how)
    most.append(len(rows.choice))
    return rows


def saved_and_continued(
    root: str, dtype: str, of_sizes: dict[tuple[int, ...], ParallelGroups]
) -> dict[tuple[str, str], list[float]]:
    """Return what `tiny.going_on` does behind a checkpoint, for the layout that wrote it and for those that read it.
    Before the checkpoint, one step is refused."""
    (layouts, how), found = HOW[dtype], {}
    sequences = 2 if dtype in ("bf16", "fp8") else 4  # There is one for each replica.
    groups = {name: of_sizes[CASES[name][0]] for name in layouts}

    def engine(name: str, seed: int) -> Engine:
        return tiny.engine(config(**CASES[name][1] | how), groups[name], seed)

    for name, other in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        first = engine(name, 3)
        if name == "ZeRO 1" and dtype == "fp32":
            assert tiny.generates_the_same(tiny.on(config(**CASES[name][1] | how), groups[name]), first), name
        take(first, range(1), sequences)
        before = tiny.state_of(first)
        own, counted = batches(first.groups, 4, sequences)
        first.step(own, len(own), 0.05, Observers(judge=lambda metrics: Verdict(apply=False)), counted)
        assert all(map(torch.equal, before, tiny.state_of(first))), f"{name}: a refused step has changed something"
        tiny.save(Path(root) / name, first.groups, tiny.run_state(1), first.owned())
        found[name, "left alone"] = tiny.going_on(first, sequences)
        second = engine(other, 11)
        tiny.load(second, Path(root) / name)
        found[name, other] = tiny.going_on(second, sequences)
        tiny.load(first, Path(root) / name)
        assert all(map(torch.equal, before, tiny.state_of(first))), f"{name}: a rewound engine has another state"
        found[name, name] = tiny.going_on(first, sequences)
    return found


@pytest.mark.parametrize("dtype", HOW)
def test_checkpoints_continue_at_every_layout(four, dtype: str) -> None:
    """They continue with the same bits, those of the router's states included, at the layout that wrote them."""
    layouts, _ = HOW[dtype]
    for rank in (each[dtype] for each in four):
        for name, other in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
            alone = rank[name, "left alone"]
            assert rank[name, name] == alone, name
            # In bf16, tokens near the border between two experts soon go another way.
            steps = slice(None) if dtype == "fp32" else slice(1)
            near = pytest.approx(alone[steps], rel=1e-5 if dtype == "fp32" else 2e-3)
            assert rank[name, other][steps] == near, (name, other)


def test_a_step_that_lacked_room_ends_with_the_same_bits(four) -> None:
    for rank in four:
        for found in rank["room"].values():
            (again, state), (once, expected) = found.values()
            # An evaluation without room is made in parts, whose products have other numbers of rows.
            assert again.pop("valid/loss") == pytest.approx(once.pop("valid/loss"), rel=1e-6)
            assert again == once
            assert all(map(torch.equal, state, expected))


# -- what balances -----------------------------------------------------------------------------------------------------


def moved(groups: ParallelGroups, masked: bool, aux: float) -> dict[str, torch.Tensor]:
    """Return by how much a step moves each tensor, with loads of the step before that differ."""
    balance = {"bias_rate": 0.0, "aux_weight": aux, "z_weight": 0.0}
    engine = tiny.engine(
        config(0, model={"experts": {**EXPERTS, "balance": balance}}, optimizer={"clip_grad": 0}), groups
    )
    for owned in engine.owned(lambda spec: spec.name.endswith("router.load")):
        owned.weight.copy_(torch.linspace(-1, 1, len(owned.weight)))
    engine.state_changed()
    before = {owned.name: owned.read("weight").clone() for owned in engine.owned()}
    own, counted = batches(engine.groups, 0)
    if not masked:
        own, counted = [replace(batch, labels=batch.labels.clamp(min=0)) for batch in own], None
    engine.step(own, len(own), 1.0, counted=counted)
    return {owned.name: owned.read("weight") - before[owned.name] for owned in engine.owned()}


def test_masks_do_not_change_the_auxiliary_loss(alone) -> None:
    every, masked = alone["losses"]
    assert every["blocks.1.mlp.router.weight"].abs().max() > 1e-3
    for name, update in every.items():
        torch.testing.assert_close(masked[name], update, rtol=1e-3, atol=1e-6, msg=lambda s, n=name: f"{n}: {s}")
