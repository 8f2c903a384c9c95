"""Weights that ranks gather in 8 bits at ZeRO 3 take the steps of weights that are gathered in 16 bits, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

import tiny
from checked_config import run_config
from distributed import run_distributed
from sagekernels import lowbit
from sagetrain.config import RunConfig
from sagetrain.config.rules import fit
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


def both_ways() -> dict[str, tuple[bool, int, int]]:
    """Return for each case whether the bits are those without it, and how often passes rounded weights each way."""
    found, groups = {}, {}
    for name in CASES:
        sizes = CASES[name].get("parallel", {}).get("tensor_parallel_size", 1)
        groups[sizes] = groups.get(sizes) or tiny.join(sizes)
        numbers, counts = [], []
        for gathered in (False, True):
            with rounded() as count:
                numbers.append(str(steps(tiny.engine(config(name, gathered), groups[sizes]), "watched" in name)))
            counts.append(len(count))
        found[name] = numbers[0] == numbers[1], *counts
    return found


def test_passes_have_the_same_bits_and_round_no_weights() -> None:
    for found in run_distributed(both_ways, 2):
        for name, (same, plain, gathered) in found.items():
            assert same, name
            # Only passes that measure rounding, or that follow somebody who has read the weights, have whole weights.
            assert plain and (gathered < plain if "watched" in name else not gathered), (name, plain, gathered)


@pytest.mark.parametrize(("sections", "ranks", "key", "words"), [
    ({"parallel": {"zero_stage": 1}}, 2, "parallel.zero_stage", "use 3, or gather_8_bits: false"),
    ({"parallel": {"offload": "all"}}, 2, "parallel.offload", "was not proven"),
    ({"stability": {"replay": {"every_steps": 5}}}, 2, "stability.replay.every_steps", "use null"),
    ({}, 3, "parallel.gather_8_bits", "3 ranks do not divide the"),
])  # fmt: skip
def test_what_does_not_go_with_them_is_refused(sections: dict, ranks: int, key: str, words: str) -> None:
    parallel = {"zero_stage": 3, "gather_8_bits": True, **sections.get("parallel", {})}
    cfg = run_config(**{"linear": {"precision": "int8"}, **sections, "parallel": parallel})
    found = [each for each in fit(cfg, ranks) if each.rule == "weights_in_8_bits"]
    assert found and found[0].level == "error" and found[0].key == key, found
    assert words in f"{found[0].message} {found[0].fix}"
