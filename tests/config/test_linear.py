# ruff: noqa: E501 - one case a line reads best
"""Configurations of linear layers in 8 bits that cannot run, and the layers that a choice means."""

import pytest

from checked_config import check_found, run_config
from sagekernels.grouped_matmul import GROUPED_LOW_BIT
from sagekernels.int8_matmul import PIECE
from sagekernels.lowbit import HEADS
from sagekernels.lowbit import LOW_BIT as PRODUCTS
from sagetrain.config.check import check
from sagetrain.config.linear_sizes import EIGHT_BITS, LOW_BIT, LinearSizes
from sagetrain.config.rules import fit
from sagetrain.config.schema import LinearConfig

CASES = [
    # The columns are: sections, world size, rule, level, key, a part of the message, a part of the fix.
    ({"linear": {"precision": "int8"}}, 1,
     "linear_int8_costs_loss", "info", "linear.precision", "0.0003 ± 0.0002 nats per token above 16 bits", "sagetrain compare"),
    ({"linear": {"precision": "int8", "keep_last_fraction": 1e-9}}, 1,
     "no_effect", "warning", "linear.keep_last_fraction", "1e-09: has no effect with these tokens_per_step", "remove"),
    ({"linear": {"precision": "fp8"}}, 1,
     "linear_fp8_costs_loss", "info", "linear.precision", "ended 0.007 ± 0.006 nats per token (0.27 %) above 16 bits", "sagetrain compare"),
    ({"linear": {"precision": "auto", "keep_first_blocks": 2}}, 1,
     "linear_blocks", "error", "linear.keep_first_blocks", "none is left for linear.precision auto", "keep fewer"),
    ({"linear": {"precision": "fp8", "keep_first_blocks": 1, "keep_last_blocks": 3}}, 1,
     "linear_blocks", "error", "linear.keep_last_blocks", "together keep 4 of the 2 blocks in 16 bits", "keep fewer"),
    ({"linear": {"precision": "bf16", "keep_first_blocks": 1}}, 1,
     "no_effect", "warning", "linear.keep_first_blocks", "has no effect with linear.precision bf16", "remove it"),
    ({"linear": {"precision": "bf16", "keep_layers_below": 1}}, 1,
     "no_effect", "warning", "linear.keep_layers_below", "has no effect with linear.precision bf16", "remove it"),
    ({"linear": {"precision": "bf16", "keep_last_fraction": 0.1}}, 1,
     "no_effect", "warning", "linear.keep_last_fraction", "has no effect with linear.precision bf16", "remove it"),
    ({"linear": {"precision": "auto", "keep_first_fraction": 0.7, "keep_last_fraction": 0.3}}, 1,
     "linear_parts", "error", "linear.keep_first_fraction", "with linear.keep_last_fraction 0.3 all of it is in 16", "use smaller ones"),
    ({"linear": {"precision": "int8", "keep_first_fraction": 0.9999}}, 1,
     "no_effect", "warning", "linear.precision", "linear.keep_first_fraction 0.9999 and these tokens_per_step", "remove"),
    ({"linear": {"precision": "auto", "head": "fp8"}}, 1,
     "linear_head", "error", "linear.head", "needs the layers of the blocks in 8 bits, not linear.precision auto", "use linear.precision int8 or fp8"),
    ({"linear": {"precision": "int8", "head": "fp8"}}, 1,
     "linear_head_costs_loss", "info", "linear.head", "in loss was not measured yet", "sagetrain compare"),
    ({"linear": {"precision": "bf16", "head": "int8"}}, 1,
     "linear_head", "error", "linear.head", "not linear.precision bf16", "or linear.head bf16"),
    ({"linear": {"precision": "int8", "head": "fp8", "keep_layers_below": 90_000}, "model": {"hidden_size": 264}}, 1,
     "linear_head", "error", "linear.head", "needs a model.hidden_size that is a multiple of 16, not 264", "use model.hidden_size 256 or 272"),
    ({"linear": {"precision": "int8", "head": "fp8"}, "parallel": {"tensor_parallel_size": 16}}, 16,
     "linear_head", "error", "linear.head", "a parallel.tensor_parallel_size that divides 8, not 16", "or linear.head bf16"),
    ({"linear": {"precision": "fp8", "keep_layers_below": 200_000}, "parallel": {"tensor_parallel_size": 2}}, 2,
     "linear_blocks", "error", "linear.keep_layers_below", "more than the 196,608 weights that a rank has of the largest layer", "use a smaller one"),
    ({"linear": {"precision": "fp8"}, "model": {"hidden_size": 264, "head_dim": 64}}, 1,
     "linear_multiple", "error", "model.hidden_size", "a side of 264 (264), which is not a multiple of 16", "use 256 or 272, or linear.precision bf16"),
    ({"linear": {"precision": "int8"}, "model": {"ffn_hidden_size": 720}, "parallel": {"tensor_parallel_size": 2}}, 2,
     "linear_multiple", "error", "model.ffn_hidden_size", "a side of 360 (720 / tensor_parallel_size 2), which", "use 704 or 736, a smaller"),
    ({"linear": {"precision": "fp8"}, "model": {"head_dim": 40, "num_key_value_heads": 1}}, 1,
     "linear_multiple", "error", "model.num_key_value_heads", "a side of 40 (1 x head_dim 40), which", "change head_dim, or linear.precision bf16"),
    ({"linear": {"precision": "auto"}, "model": {"ffn_hidden_size": 700}}, 1,
     "linear_multiple", "info", "model.ffn_hidden_size", "linear.precision auto keeps gate_up and down in 16 bits for that", "use 688 or 704"),
    ({"linear": {"precision": "auto", "keep_first_blocks": 1}, "training": {"dtype": "fp32"}}, 1,
     "no_effect", "warning", "linear.keep_first_blocks", "with linear.precision auto and training.dtype fp32: no layer is in 8 bits", "remove it"),
    ({"linear": {"precision": "fp8"}, "training": {"dtype": "fp32"}}, 1,
     "low_bit_linear_in_fp32", "info", "training.dtype", "takes fp32 without a GPU only", "linear.precision bf16"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_findings(case):
    check_found(*case)


@pytest.mark.parametrize(("rule", "sections"), [
    # gate_up and down have odd sides, and too few weights to be in 8 bits.
    ("linear_multiple", {"linear": {"precision": "fp8", "keep_layers_below": 190_000}, "model": {"ffn_hidden_size": 120}}),
    ("linear_int8_costs_loss", {}),
    ("no_effect", {"training": {"dtype": "fp32"}}),
    *(
        (rule, {"linear": {"precision": "auto"}, "training": {"dtype": "fp32"}})
        for rule in ("low_bit_linear_in_fp32", "linear_int8_costs_loss")
    ),
])  # fmt: skip
def test_what_does_no_harm_is_no_finding(rule, sections):
    assert rule not in {finding.rule for finding in fit(run_config(**sections), 1)}


CONSTANT = {"schedule": "constant", "tokens": 512}
# The ramp's steps begin at 0, 512, .. 2048 and 3072 tokens.
RAMP = {"schedule": "ramp", "start": 512, "end": 1024, "ramp_tokens": 2048}
STAGES = {"schedule": "stages", "stages": [{"from_tokens": 0, "tokens": 512}, {"from_tokens": 2048, "tokens": 1024}]}
AWARE = {"schedule": "noise_aware", "start": 1024, "floor": 1024, "ceiling": 1536, "hold_tokens": 1024}
FIXED = {**AWARE, "ceiling": 1024}


@pytest.mark.parametrize(("schedule", "total", "fraction", "said"), [
    (CONSTANT, 10 * 512, 0.1, False), (CONSTANT, 10 * 512, 0.09, True),
    (CONSTANT, 9 * 512 + 1, 0.01, False), (CONSTANT, 9 * 512 + 1, 1e-5, True),
    (RAMP, 4096, 0.25, False), (RAMP, 4096, 0.24, True), (STAGES, 4096, 0.25, False), (STAGES, 4096, 0.24, True),
    # In a run of 4,096 tokens three steps can reach the last part and leave some of it. In a run of 2,048 tokens two
    # steps reach the end and leave nothing.
    (FIXED, 4096, 0.25, False), (FIXED, 4096, 0.24, True), (AWARE, 4096, 0.24, False), (AWARE, 2048, 0.24, True),
])  # fmt: skip
def test_a_last_part_in_which_no_step_begins_has_no_effect(schedule, total: int, fraction: float, said: bool) -> None:
    """The last part also has no effect if the run's last step ends beyond its total tokens. For noise_aware every
    possible decision must lead there."""
    cfg = run_config(
        linear={"precision": "fp8", "keep_last_fraction": fraction},
        tokens_per_step=schedule,
        training={"total_tokens": total},
        lr_schedule={"warmup_tokens": 0},
    )
    keys = [finding.key for finding in check(cfg, 1) if finding.rule == "no_effect"]
    assert ("linear.keep_last_fraction" in keys) == said


def test_a_late_first_stage_is_refused_beside_a_last_part() -> None:
    stages = {"schedule": "stages", "stages": [{"from_tokens": 512, "tokens": 512}]}
    cfg = run_config(linear={"precision": "fp8", "keep_last_fraction": 0.1}, tokens_per_step=stages)
    assert "first_stage" in {finding.rule for finding in check(cfg, 1)}


def test_auto_is_16_bits_or_int8_from_a_size_on() -> None:
    """Layers that cannot be in 8 bits do not count, and neither do layers that must stay in 16 bits."""
    layers = [LinearSizes(16, {"a": size}) for size in (32, 48, 32, 72, 16)]
    first, *low = LinearConfig(precision="auto", keep_layers_below=400).choices(layers)
    assert (first.precision, first.keep_layers_below) == ("bf16", 400)
    assert {choice.precision for choice in low} == {"int8"}
    assert [choice.keep_layers_below for choice in low] == [400, 512, 768]


def test_the_facts_of_a_precision_are_those_of_its_products():
    assert [*EIGHT_BITS] == [*LOW_BIT] == [*PRODUCTS] == [*HEADS] == [*GROUPED_LOW_BIT]
    for name, facts in EIGHT_BITS.items():
        assert facts.travels == PRODUCTS[name].travels
        assert facts.head_gradients == (HEADS[name].gradient is not None)
    assert EIGHT_BITS["int8"].most_terms == PIECE
