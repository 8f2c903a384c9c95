"""The rules of the papers are named findings, for every kind of schedule, and can be overridden by name."""

import pytest

import checked_config
from runs import ROOT
from sagetrain.config import RunConfig
from sagetrain.config.guidance import RULES, guidance

SAFE = 64 * 4096


def run_config(tokens: dict | int = SAFE, override: tuple[str, ...] = (), **sections: dict) -> RunConfig:
    """Build a configuration without findings of the papers' rules, then change it."""
    if isinstance(tokens, int):
        tokens = {"schedule": "constant", "tokens": tokens}
    fixed = {"data": {"seq_length": 4096, "micro_batch_size": 4}, "guidance": {"override": list(override)}}
    return checked_config.run_config(tokens_per_step=tokens, **{"optimizer": {"lr": 3e-4}, **fixed, **sections})


LOUD = {
    "attention": {"recipe": "paper", "smooth_k": False},
    "lr_schedule": {"warmup_tokens": 0},
    "optimizer": {"lr": 1e-2},
}
"""Sections in which each rule finds something that does not look at the tokens per step."""


def found(cfg: RunConfig) -> list[tuple[str, str]]:
    return [(f.rule, f.level) for f in guidance(cfg)]


def test_a_run_as_the_papers_advise():
    assert found(run_config()) == []


@pytest.mark.parametrize(("tokens", "key", "value"), [
    (SAFE + 4096, "tokens_per_step.tokens", SAFE + 4096),
    ({"schedule": "ramp", "start": 65536, "end": 2**20, "ramp_tokens": 10**7}, "tokens_per_step.end", 2**20),
    ({"schedule": "ramp", "start": 2**20, "end": 65536, "ramp_tokens": 10**7}, "tokens_per_step.start", 2**20),
    (
        {
            "schedule": "stages",
            "stages": [
                {"from_tokens": 0, "tokens": 65536},
                {"from_tokens": 10**6, "tokens": 2**19},
                {"from_tokens": 10**7, "tokens": 65536},
            ],
        },
        "tokens_per_step.stages.1.tokens",
        2**19,
    ),
])  # fmt: skip
def test_large_steps_without_qk_norm_are_refused_in_any_stage(tokens, key, value):
    (finding,) = guidance(run_config(tokens, attention={"qk_norm": "none"}))
    assert (finding.rule, finding.level) == ("qk_norm_for_large_steps", "error")
    assert (finding.key, finding.value) == (key, value)
    for part in ("without QK-norm diverges", "262144", "2.1M", "dS"):
        assert part in finding.message
    for way_out in ("before_rope", "at most 262144 tokens per step", "sdpa", "override: [qk_norm_for_large_steps]"):
        assert way_out in finding.fix
    paper = "SageBwd (arXiv 2603.02170), section 5: pretraining with and without QK-norm"
    assert finding.source == f"{paper}; our runs: results/qk-norm-large"


@pytest.mark.parametrize("cfg", [
    run_config(SAFE, attention={"qk_norm": "none"}), run_config(2**20, attention={"qk_norm": "before_rope"}),
    run_config(2**20, attention={"qk_norm": "after_rope"}),
    run_config(2**22, attention={"qk_norm": "none", "backend": "sdpa"}),
    run_config(2**22, attention={"qk_norm": "none", "backend": "flash"}),
    run_config(2**22, attention={"qk_norm": "none", "backend": "reference"}),
])  # fmt: skip
def test_the_ways_out_are_ways_out(cfg):
    assert found(cfg) == []


@pytest.mark.parametrize(
    ("tokens", "warned"), [(1_998_848, False), (2_000_896, True), (512 * 4096, True), (2**22, True)]
)
def test_two_million_tokens_per_step_are_warned_about(tokens, warned):
    findings = guidance(run_config(tokens))
    assert [(f.rule, f.level) for f in findings] == [("int8_at_2m_tokens_per_step", "warning")] * warned
    for finding in findings:
        assert "2.640 against 2.586" in finding.message
        assert "2.561 against 2.563" in finding.message
        assert (finding.key, finding.value) == ("tokens_per_step.tokens", tokens)


def test_without_qk_norm_the_error_says_it_all():
    assert found(run_config(512 * 4096, attention={"qk_norm": "none"})) == [("qk_norm_for_large_steps", "error")]


@pytest.mark.parametrize(("sections", "rule", "level", "key", "message"), [
    ({"attention": {"smooth_k": False}}, "smooth_k_off", "warning", "attention.smooth_k", "needed for stable INT8"),
    ({"attention": {"recipe": "paper"}}, "coarse_recipe", "warning", "attention.recipe", "puts a bias into"),
    ({"lr_schedule": {"warmup_tokens": 0}}, "no_warmup", "warning", "lr_schedule.warmup", "2.5 % of the run"),
    ({"optimizer": {"lr": 2e-3}}, "lr_above_published", "info", "optimizer.lr", "3e-5, and 1e-3"),
])  # fmt: skip
def test_the_other_rules(sections, rule, level, key, message):
    (finding,) = guidance(run_config(**sections))
    assert (finding.rule, finding.level, finding.key) == (rule, level, key)
    assert message in finding.message
    assert finding.fix
    assert "arXiv" in finding.source
    assert found(run_config(**{**sections, "attention": {**sections.get("attention", {}), "backend": "sdpa"}})) == []


def test_an_override_keeps_the_finding_on_record():
    rules = ("qk_norm_for_large_steps", "smooth_k_off")
    cfg = run_config(2**20, rules, attention={"qk_norm": "none", "smooth_k": False})
    findings = guidance(cfg)
    assert [(f.rule, f.level) for f in findings] == [(rule, "info") for rule in rules]
    assert findings[0].message.startswith("overridden (error): INT8 attention without QK-norm diverges")
    assert findings[1].message.startswith("overridden (warning): K-smoothing")


def test_an_override_accepts_its_own_rule_only():
    cfg = run_config(2**20, ("smooth_k_off",), attention={"qk_norm": "none"})
    assert found(cfg) == [("qk_norm_for_large_steps", "error")]


def test_unknown_rules_are_errors_with_the_nearest_name():
    first, second = guidance(run_config(override=("qk_norm_for_large_step", "xyzzy")))
    assert (first.level, first.key, first.value) == ("error", "guidance.override.0", "qk_norm_for_large_step")
    assert first.fix == "did you mean qk_norm_for_large_steps?"
    assert second.key == "guidance.override.1"
    assert all(name in second.fix for name in RULES)


def test_every_rule_has_fired_above_and_the_list_is_complete():
    loud = {**LOUD, "attention": {**LOUD["attention"], "qk_norm": "none"}}
    fired = {rule for sections in (loud, {}) for rule, _ in found(run_config(512 * 4096, **sections))}
    assert fired == set(RULES) - {"measured_ratio"}  # tests/stability/test_measured.py tests this rule.


def test_sources_are_papers_and_results_that_are_there():
    named = [part for finding in guidance(run_config(512 * 4096, **LOUD)) for part in finding.source.split("; ")]
    assert all("arXiv" in part or (ROOT / part.removeprefix("our runs: ") / "README.md").is_file() for part in named)
    assert "our runs: results/recipe-gap" in named
