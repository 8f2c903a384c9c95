# ruff: noqa: E501 - one case a line reads best
"""Configurations of measurements and decisions (the section stability) that cannot run."""

import pytest

from checked_config import check_found, run_config
from sagetrain.config.rules import fit

ONE = {"data": {"micro_batch_size": 1}, "tokens_per_step": {"schedule": "constant", "tokens": 1024}}


def aware(**keys: int) -> dict:
    base = {"start": 65536, "floor": 16384, "ceiling": 262144, "hold_tokens": 10**6}
    return {"schedule": "noise_aware", **base, **keys}


AWARE = {"tokens_per_step": aware(), "stability": {"quant_noise": {"every_steps": 200}}}
CASES = [
    # The columns are: sections, world size, rule, level, key, a part of the message, a part of the fix.
    ({**ONE, "stability": {"noise_scale": {"every_steps": 5}}}, 1,
     "no_effect", "warning", "stability.noise_scale.every_steps", "steps of one micro-batch of 1024 tokens", "remove it"),
    ({"attention": {"backend": "sdpa"}, "linear": {"precision": "bf16"}, "stability": {"quant_noise": {"every_steps": 50}}}, 1,
     "probe_of_16_bits", "error", "stability.quant_noise.every_steps", "50: attention.backend sdpa quantizes nothing, linear layers neither", "use attention.backend sage"),
    ({"stability": {"quant_noise": {"every_steps": 50}, "noise_scale": {"every_steps": None}}}, 1,
     "probe_without_noise", "error", "stability.quant_noise.every_steps", "noise of the gradients, which is not measured", "noise_scale.every_steps, to 10"),
    ({**ONE, "stability": {"quant_noise": {"every_steps": 50}}}, 1,
     "probe_without_noise", "error", "stability.quant_noise.every_steps", "one micro-batch of 1024 tokens", "smaller data.micro_batch_size"),
    ({**AWARE, "attention": {"backend": "sdpa"}, "linear": {"precision": "bf16"}}, 1,
     "noise_aware_of_16_bits", "error", "tokens_per_step.schedule", "attention.backend sdpa with linear.precision bf16 quantizes nothing", "use attention.backend sage"),
    ({**AWARE, "attention": {"backend": "auto"}}, 1,
     "noise_aware_of_16_bits", "error", "tokens_per_step.schedule", "attention.backend auto with linear.precision auto may quantize nothing", "name linear.precision int8"),
    ({**AWARE, "stability": {}}, 1,
     "noise_aware_unmeasured", "error", "tokens_per_step.schedule", "stability.quant_noise.every_steps is null", "to 200 for instance"),
    ({**AWARE, "stability": {**AWARE["stability"], "noise_scale": {"every_steps": None}}}, 1,
     "noise_aware_unmeasured", "error", "tokens_per_step.schedule", "stability.noise_scale.every_steps is null", "to 10 for instance"),
    ({**AWARE, "stability": {"quant_noise": {"every_steps": 10**6}}}, 1,
     "noise_aware_unmeasured", "warning", "stability.quant_noise.every_steps", "so it is never measured: nothing would be decided", "to 200 for instance"),
    ({**AWARE, "stability": {**AWARE["stability"], "noise_scale": {"every_steps": 10**6}}}, 1,
     "noise_aware_unmeasured", "warning", "stability.noise_scale.every_steps", "nothing would be decided", "to 10 for instance"),
    ({**AWARE, "tokens_per_step": aware(floor=131072, ceiling=65536)}, 1,
     "noise_aware_bounds", "error", "tokens_per_step.floor", "131072: floor 131072, start 65536 and ceiling 65536", "floor <= start <= ceiling"),
    ({**AWARE, "tokens_per_step": aware(start=4194304)}, 1,
     "noise_aware_bounds", "error", "tokens_per_step.start", "are not in this order", "floor <= start <= ceiling"),
    ({**AWARE, "tokens_per_step": aware(multiple=24576)}, 1,
     "noise_aware_multiple", "error", "tokens_per_step.ceiling", "is not a multiple of tokens_per_step.multiple 24576", "use 245760 or 270336"),
    ({**AWARE, "tokens_per_step": aware(floor=2048)}, 1,
     "noise_aware_floor", "error", "tokens_per_step.floor", "one data-parallel replica with accumulation 1", "use 4096 or more, or a smaller data.micro_batch_size"),
    ({**AWARE, "tokens_per_step": aware(floor=8192, multiple=2048)}, 8,
     "whole_micro_steps", "error", "tokens_per_step.multiple", "2048: is not a multiple of micro_batch_size 2", "use 16384"),
    ({**AWARE, "lr_schedule": {"batch_rule": "sqrt"}}, 1,
     "batch_rule_reference", "error", "lr_schedule.reference_tokens_per_step", "needs it", "65536 if optimizer.lr is meant for the first steps"),
]  # fmt: skip


def test_a_noise_aware_schedule_that_can_be_has_no_findings():
    for world_size in (1, 2, 8):
        assert fit(run_config(**AWARE), world_size) == []


@pytest.mark.parametrize("case", CASES)
def test_findings(case):
    check_found(*case)


@pytest.mark.parametrize("stability", [{}, {"noise_scale": {"every_steps": None}}])
def test_a_run_of_single_micro_batches_measures_nothing_unasked(stability):
    assert fit(run_config(**ONE, stability=stability), 1) == []
