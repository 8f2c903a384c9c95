"""Weights that ranks gather in 8 bits at ZeRO 3 take the steps of weights that are gathered in 16 bits, bit for bit."""

from __future__ import annotations

import pytest

import gathered_codes
from checked_config import run_config
from distributed import run_distributed
from sagetrain.config.rules import fit


def test_passes_have_the_same_bits_and_round_no_weights() -> None:
    for found in run_distributed(gathered_codes.both_ways, 2):
        gathered_codes.check(found)


@pytest.mark.parametrize(("sections", "ranks", "key", "words"), [
    ({"parallel": {"zero_stage": 1}}, 2, "parallel.zero_stage", "use 3, or gather_8_bits: false"),
    ({"parallel": {"engine": "deepspeed"}}, 2, "parallel.engine", "was not proven"),
    ({"parallel": {"gradient_reduction": "bf16"}}, 2, "parallel.gradient_reduction", "was not proven"),
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
