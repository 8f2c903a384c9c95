# ruff: noqa: E501 - one case a line reads best
"""Measurements and decisions of the stability section that cannot be as configured."""

import pytest

from sagetrain.config.rules import fit
from test_config_rules import run_config

ONE = {"data": {"micro_batch_size": 1}, "tokens_per_step": {"schedule": "constant", "tokens": 1024}}
CASES = [
    # sections, world size, rule, level, key, what the message says, what the fix says
    (
        {**ONE, "stability": {"noise_scale": {"every_steps": 5}}}, 1,
        "no_effect", "warning", "stability.noise_scale.every_steps", "steps of one micro-batch of 1024 tokens", "remove it",
    ),
    (
        {"attention": {"backend": "sdpa"}, "stability": {"quant_noise": {"every_steps": 50}}}, 1,
        "probe_of_16_bits", "error", "stability.quant_noise.every_steps", "50: attention.backend sdpa quantizes nothing", "use attention.backend sage",
    ),
    (
        {"stability": {"quant_noise": {"every_steps": 50}, "noise_scale": {"every_steps": None}}}, 1,
        "probe_without_noise", "error", "stability.quant_noise.every_steps", "noise of the gradients, which is not measured", "noise_scale.every_steps, to 10",
    ),
    (
        {"stability": {"quant_noise": {"every_steps": 50}}, "parallel": {"zero_stage": 3}}, 2,
        "probe_at_zero_3", "error", "stability.quant_noise.every_steps", "hooks of parallel.zero_stage 3", "parallel.zero_stage 2",
    ),
    (
        {**ONE, "stability": {"quant_noise": {"every_steps": 50}}}, 1,
        "probe_without_noise", "error", "stability.quant_noise.every_steps", "one micro-batch of 1024 tokens", "smaller data.micro_batch_size",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "world_size", "rule", "level", "key", "message", "fix"), CASES)
def test_findings(sections, world_size, rule, level, key, message, fix):
    found = {finding.rule: finding for finding in fit(run_config(**sections), world_size)}
    finding = found[rule]
    assert (finding.level, finding.key) == (level, key)
    assert message in str(finding) and fix in finding.fix


@pytest.mark.parametrize("stability", [{}, {"noise_scale": {"every_steps": None}}])
def test_a_run_of_single_micro_batches_measures_nothing_unasked(stability):
    assert fit(run_config(**ONE, stability=stability), 1) == []
