"""Steps at ZeRO 3 with weights that are gathered in 16 bits, and with weights that are gathered in 8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

import tiny
from sagekernels import lowbit
from sagetrain.config import RunConfig
from sagetrain.engines.protocol import Engine, Observers
from sagetrain.parallel.digest import digest
from sagetrain.stability.linear_errors import LinearErrors
from sagetrain.stability.quant_noise import QuantizationProbe

SHAPE = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2}
CHANCE = {"name": "muon", "master": "bf16_chance", "moments": "int8"}
CASES: dict[str, dict[str, Any]] = {
    "fp8 tensorwise, recomputed": {"training": {"activation_checkpointing": "full"}},
    "int8 rowwise, selective": {"training": {"activation_checkpointing": "selective"}},
    "fp8 rowwise, Muon, bf16": {"optimizer": CHANCE},
    "int8 rowwise_bf16_wgrad, TP": {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "fp8 rowwise_bf16_wgrad, watched": {},
}


def config(name: str, gathered: bool) -> RunConfig:
    precision, recipe = name.split(",")[0].split()
    case = CASES[name]
    parallel = {"engine": "fsdp", "zero_stage": 3, "gather_8_bits": gathered, **case.get("parallel", {})}
    linear = {"precision": precision, "recipe": recipe, "keep_layers_below": 64 * 64 + 1}  # `out` stays in 16 bits.
    return tiny.config(3, "bf16", model=SHAPE, linear=linear, **{**case, "parallel": parallel})


@contextmanager
def rounded() -> Iterator[list[None]]:
    """Count how often a pass takes whole weights to round them."""
    found, whole, now = [], lowbit._whole, lowbit._whole_now
    with (
        patch.object(lowbit, "_whole", lambda weights: (found.append(None), whole(weights))[1]),
        patch.object(lowbit, "_whole_now", lambda weights, gradient: (found.append(None), now(weights, gradient))[1]),
    ):
        yield found


def observers(engine: Engine) -> Observers:
    model, leaves = engine.model, engine.leaves()
    noise = QuantizationProbe(model, model.functions[0], engine.groups, engine.device, leaves)
    return Observers(probes=[LinearErrors(model, range(2), leaves), noise])


def bits(x: Tensor) -> int:
    return int(digest(x)) if x.numel() else 0


def steps(engine: Engine, watched: bool) -> list[Any]:
    """Return the numbers and the bits of steps, around an evaluation and around weights that somebody writes."""
    first = tiny.global_step(engine, 0)
    found = [first.loss, first.grad_norm, tiny.evaluation(engine, ["web"])["valid/loss"]]
    if watched:
        found += map(bits, engine.gathered().values())
        # The first forward pass finds whole weights, and its backward pass gathers them again.
        found.append(tiny.global_step(engine, 0, sequences=8).loss)
        matmuls = engine.model.matmuls
        engine.model.use_16_bits()
        engine.weights_changed()
        found.append(tiny.global_step(engine, 1).loss)
        engine.model.matmuls = matmuls
        found.append(sorted(tiny.global_step(engine, 2, observers=observers(engine)).metrics.items()))
    for owned in engine.owned(lambda spec: spec.name.startswith("blocks.")):
        owned.write("weight", 0.5 * owned.read("weight"))
    engine.state_changed()
    last = tiny.global_step(engine, 3, sequences=8)
    state = (owned.read(kind) for owned in engine.owned() for kind in owned.kinds)
    return [*found, last.loss, last.grad_norm, *map(bits, state)]


def both_ways(cases: Iterable[str] = CASES) -> dict[str, tuple[bool, int, int]]:
    """Return for each case whether both ways have the same bits, and how often passes rounded weights each way."""
    found, groups = {}, {}
    for name in cases:
        sizes = CASES[name].get("parallel", {}).get("tensor_parallel_size", 1)
        groups[sizes] = groups.get(sizes) or tiny.join(sizes)
        numbers, counts = [], []
        for gathered in (False, True):
            with rounded() as count:
                numbers.append(str(steps(tiny.engine(config(name, gathered), groups[sizes]), "watched" in name)))
            counts.append(len(count))
        found[name] = numbers[0] == numbers[1], *counts
    return found


def check(found: dict[str, tuple[bool, int, int]]) -> None:
    for name, (same, plain, gathered) in found.items():
        assert same, name
        # Only passes that measure rounding, or that follow somebody who has read the weights, have whole weights.
        assert plain and (gathered < plain if "watched" in name else not gathered), (name, plain, gathered)
