# ruff: noqa: E501 - one case a line reads best
"""Configurations of precision ladders and of linear layers in 8 bits that cannot run."""

import pytest

from checked_config import only, run_config
from sagetrain.config.check import check
from sagetrain.config.rules import fit

PAPER = {"recipe": "paper"}
RUNGS = {"rungs": ["fine", "gradients", "sdpa"]}
MOVED = {**RUNGS, "spike_tokens": 10**6}


def threshold(**settings: object) -> dict:
    return {**RUNGS, "threshold": {"above": 0.5, "cooldown_tokens": 10**6, **settings}}


CASES = [
    # The columns are: attention, stability.precision, rule, level, key, a part of the message, a part of the fix.
    (PAPER, RUNGS, "no_effect", "warning", "stability.precision", "no layer ever moves", "remove it"),
    ({"backend": "sdpa"}, MOVED, "precision_backend", "error", "attention.backend", "\"sdpa\": quantizes nothing", "attention.backend: sage"),
    ({"backend": "auto"}, MOVED, "precision_backend", "error", "attention.backend", "times one attention for all layers", "attention.backend: sage"),
    ({"recipe": "auto"}, MOVED, "precision_recipe", "error", "attention.recipe", "does not say what the lowest rung", "paper or fine"),
    ({"recipe": "fine"}, MOVED, "precision_order", "error", "stability.precision.rungs.0", "\"fine\": is not above fine, attention.recipe", "paper, fine, gradients, sdpa"),
    (PAPER, {**MOVED, "rungs": ["scores", "gradients", "sdpa"]}, "precision_order", "error", "stability.precision.rungs.1", "\"gradients\": is not above scores, the rung before it", "one"),
    (PAPER, {**MOVED, "rungs": ["sdpa", "fine", "reference"]}, "precision_order", "error", "stability.precision.rungs.1", "\"fine\": is not above sdpa", "order"),
    (PAPER, {**MOVED, "rungs": ["fine", "gradients"]}, "precision_16_bit", "error", "stability.precision.rungs", "ends with gradients", "sdpa or flash"),
    (PAPER, {**RUNGS, "floors": [{"rung": "scores", "last_fraction": 0.1}]}, "precision_rung", "error", "stability.precision.floors.0.rung", "is not one of stability.precision.rungs: fine, gradients, sdpa", "add it there"),
    (PAPER, {**RUNGS, "floors": [{"rung": "sdpa", "first_layers": 3}]}, "precision_layers", "error", "stability.precision.floors.0.first_layers", "more than the model's 2 layers", "at most 2"),
    (PAPER, threshold(metric="train/loss"), "precision_metric", "error", "stability.precision.threshold.metric", "no number of single layers", "quant/*/dS/rel_l2"),
    (PAPER, threshold(metric="quant/*/dS/cosine"), "precision_metric", "error", "stability.precision.threshold.metric", "grows with the error", "rel_l2"),
    (PAPER, threshold(metric="quant_noise/*/ratio"), "precision_unmeasured", "error", "stability.precision.threshold.metric", "stability.quant_noise.every_steps is null", "500"),
    (PAPER, threshold(below=0.5), "precision_hysteresis", "error", "stability.precision.threshold.below", "is not below stability.precision.threshold.above 0.5", "0.25"),
    (PAPER, threshold(below=0.1, cooldown_tokens=0), "precision_cooldown", "warning", "stability.precision.threshold.cooldown_tokens", "very next step", "cool-down"),
]  # fmt: skip


@pytest.mark.parametrize(("attention", "precision", "rule", "level", "key", "message", "fix"), CASES)
def test_findings(attention, precision, rule, level, key, message, fix):
    finding = only(fit(run_config(attention=attention, stability={"precision": precision}), 1))
    assert (finding.rule, finding.level, finding.key) == (rule, level, key)
    assert message in str(finding) and fix in finding.fix


def test_a_threshold_needs_what_it_reads():
    ratio, error = (threshold(metric=metric) for metric in ("quant_noise/*/ratio", "quant/*/dQ/rel_l2"))
    probed = {"precision": ratio, "quant_noise": {"every_steps": 500}, "monitor": {"every_steps": None}}
    assert fit(run_config(attention=PAPER, linear={"precision": "bf16"}, stability=probed), 1) == []
    finding = only(fit(run_config(attention=PAPER, stability=probed), 1))
    assert (finding.rule, finding.level) == ("precision_counts_linear", "warning")
    finding = only(fit(run_config(attention=PAPER, stability={**probed, "precision": error}), 1))
    assert finding.rule == "precision_unmeasured" and "stability.monitor.every_steps is null" in str(finding)


def test_a_threshold_on_numbers_that_never_come_is_found():
    """If such a threshold were not found, no layer would ever move, and nothing would say so."""
    gains, zeros = (threshold(metric=f"quant/*/{what}") for what in ("Q/gain_max", "dS/zero_share_dQ"))
    bare = {"attention": {**PAPER, "qk_norm": "none"}, "stability": {"precision": gains}}
    finding = only([f for f in fit(run_config(**bare), 1) if f.level == "error"])
    assert finding.rule == "precision_unmeasured" and "attention.qk_norm is none" in str(finding)
    assert fit(run_config(attention=PAPER, stability={"precision": gains}), 1) == []
    scores = {"attention": {"recipe": "scores"}, "stability": {"precision": {**zeros, "rungs": ["sdpa"]}}}
    finding = only([f for f in fit(run_config(**scores), 1) if f.level == "error"])
    assert finding.rule == "precision_unmeasured" and "scores, which keeps dS in 16 bits" in str(finding)
    on_the_way = {"attention": PAPER, "stability": {"precision": {**zeros, "rungs": ["scores", "sdpa"]}}}
    finding = only(fit(run_config(**on_the_way), 1))
    assert finding.level == "error" and "no threshold moves a layer on from there" in str(finding)
    some = {"precision": threshold(metric="quant/*/dS/rel_l2"), "monitor": {"layers": [0]}}
    finding = only(fit(run_config(attention=PAPER, stability=some), 1))
    assert (finding.rule, finding.level, finding.key) == (
        "precision_unmeasured", "warning", "stability.monitor.layers"
    )  # fmt: skip
    assert "the threshold moves no other layer" in str(finding) and "all" in finding.fix


def test_flash_on_a_ladder_needs_16_bits():
    sections = {"attention": PAPER, "stability": {"precision": {**MOVED, "rungs": ["flash"]}}}
    assert fit(run_config(**sections), 1) == []
    finding = only([f for f in fit(run_config(**sections, training={"dtype": "fp32"}), 1) if f.level == "error"])
    assert finding.rule == "flash_needs_16_bits" and finding.key == "stability.precision.rungs.0"


@pytest.mark.parametrize(
    "precision",
    [
        {"rungs": ["sdpa"], "floors": [{"rung": "sdpa", "last_fraction": 0.1}]},
        {
            **RUNGS,
            "floors": [{"rung": "fine", "first_layers": 2, "last_layers": 1}, {"rung": "sdpa", "last_layers": 2}],
        },
        threshold(below=0.1),
        threshold(metric="quant/*/S/largest", above=50.0),
        MOVED,
    ],
)
def test_sound_ladders(precision):
    found = check(run_config(attention=PAPER, stability={"precision": precision}), 1, files=False)
    about = [finding for finding in found if finding.key.startswith(("stability", "attention"))]
    # The finding is about the lowest rung, whatever is above it.
    assert [finding.rule for finding in about] == ["coarse_recipe"]


def test_an_odd_side_of_a_layer_in_16_bits_is_no_error():
    narrow = {"num_key_value_heads": 1, "head_dim": 40}  # The weights of q, k and v are 256 x 240.
    for below, rules in ((256 * 240, {"linear_multiple"}), (256 * 240 + 1, set())):
        cfg = run_config(linear={"precision": "fp8", "keep_layers_below": below}, model=narrow)
        assert {f.rule for f in check(cfg, 1, files=False) if f.level == "error"} == rules
