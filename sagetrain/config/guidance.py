"""The stability rules of the SageBwd papers and of our own runs, as findings on a RunConfig. Every number has a source:
a paper, a folder of results/, or the run that `sagetrain plan --measured` names.

Every rule applies to every stage of the tokens-per-step schedule. `guidance.override` accepts the finding of a rule by
the rule's name. The finding is then recorded as information.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping

from sagetrain.config.arithmetic import may_be_low_bit, warmup_tokens
from sagetrain.config.earlier_run import ALL, MeasuredRun, critical_in_words, critical_tokens, margin_of
from sagetrain.config.errors import Finding, Level
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig

_SAGEBWD = "SageBwd (arXiv 2603.02170)"
_SAGE3 = "SageAttention3 (arXiv 2505.11594)"  # This paper has the first form of the method.
_RECIPE_GAP = "our runs: results/recipe-gap"
_TOKENS_PER_STEP = "our runs: results/tokens-per-step"
_BIAS = "our runs: results/bias"
_QK_NORM = "our runs: results/qk-norm-large"
_SMOOTHING = "our runs: results/smoothing"

# The largest number of tokens per step at which INT8 attention without QK-norm trained on par in the paper: 64
# sequences of 4096 tokens.
SAFE_WITHOUT_QK_NORM = 64 * 4096
LARGE_STEP = 2_000_000

RULES = {
    "qk_norm_for_large_steps": "INT8 attention above 262,144 tokens per step needs QK-norm",
    "int8_at_2m_tokens_per_step": "INT8 attention at 2M tokens per step or more ends with a higher loss",
    "coarse_recipe": "recipe paper ends with a higher loss than recipe scores",
    "smooth_k_off": "INT8 attention needs K-smoothing",
    "no_warmup": "the papers' runs warm the learning rate up",
    "lr_above_published": "no INT8 pretraining with a higher learning rate than 1e-3 is published",
    "measured_ratio": "an earlier run measured what quantization adds to the gradient's noise",
}


def guidance(cfg: RunConfig, measured: MeasuredRun | None = None) -> list[Finding]:
    """Return the findings of the papers' rules, and of an earlier run's measurements, about this run. Tokens per step
    are global, so the number of ranks changes nothing. Overridden findings come back as information; unknown names in
    guidance.override are errors."""
    findings = [*(_findings(cfg) if cfg.attention.may_be_int8 else []), *(_measured(cfg, measured) if measured else [])]
    for place, found in enumerate(findings):
        if found.rule in cfg.guidance.override:
            message = f"overridden ({found.level}): {found.message}"
            findings[place] = dataclasses.replace(found, level="info", message=message)
    return findings + list(_unknown_overrides(cfg))


def _findings(cfg: RunConfig) -> Iterator[Finding]:
    key, tokens = max(cfg.tokens_per_step.named_tokens.items(), key=lambda item: item[1])
    if tokens > SAFE_WITHOUT_QK_NORM and cfg.attention.qk_norm == "none":
        yield About("qk_norm_for_large_steps", key, tokens).error(
            f"INT8 attention without QK-norm diverges at large tokens per step: the paper's run was on par "
            f"with full precision at 260K ({SAFE_WITHOUT_QK_NORM}) and diverged at 2.1M, where gradient noise no "
            "longer hides the error of the quantized dS. (Our runs, 43M parameters and three seeds, were stable: after "
            "a first half in 16 bits their loss was 0.0005 ± 0.0004 higher at 524,288 and 0.0002 ± 0.0002 higher at "
            "2,097,152. In INT8 from the first token on, at 524,288, they did not diverge either; chance was larger "
            "than any difference)",
            "set attention.qk_norm to before_rope or after_rope; or use at most "
            f"{SAFE_WITHOUT_QK_NORM} tokens per step in every stage; or a 16-bit attention.backend (sdpa, flash); or "
            "accept the risk with guidance.override: [qk_norm_for_large_steps]",
            f"{_SAGEBWD}, section 5: pretraining with and without QK-norm; {_QK_NORM}",
        )
    elif tokens >= LARGE_STEP:
        yield About("int8_at_2m_tokens_per_step", key, tokens).warning(
            "INT8 attention lost to full precision at 2.1M tokens per step even with QK-norm: 2.640 against "
            "2.586 after 78B tokens; at 260K it did not: 2.561 against 2.563. (Our runs, 43M parameters and six pairs "
            "with a common first half, lost 0.0004 ± 0.0002 with recipe paper in 18 steps of 2,097,152 tokens, and "
            "0.0038 ± 0.0010 in steps of 16,384 for as many tokens. Fewer tokens per step did not help; recipe scores "
            "did: -0.0000 ± 0.0001)",
            "attention.recipe: scores or fine, a 16-bit attention.backend, or, by the paper, fewer tokens per step; "
            "sagetrain compare tells which",
            f"{_SAGEBWD}, section 5: 325M model, context 4096; {_TOKENS_PER_STEP}",
        )
    if cfg.attention.recipe == "paper":
        yield About("coarse_recipe", "attention.recipe", "paper").warning(
            "it puts a bias into the gradients that recipe scores does not have. Our runs, 43M parameters and six "
            "pairs with a common first half in 16 bits, ended 0.0038 ± 0.0010 higher with it in steps of 16,384 tokens "
            "and 0.0026 ± 0.0009 higher in steps of 65,536; with scores it was -0.0000 ± 0.0001, with fine 0.0004 ± "
            "0.0011 and 0.0000 ± 0.0002",
            "attention.recipe: scores, or auto; sagetrain compare shows what it costs your model",
            f"{_SAGEBWD}, section 3: the recipe; {_TOKENS_PER_STEP}; {_BIAS}",
        )
    if not cfg.attention.smooth_k:
        yield About("smooth_k_off", "attention.smooth_k", False).warning(
            "K-smoothing was needed for stable INT8 pretraining even at 260K tokens per step. (Our runs with QK-norm "
            "were stable without it and ended 0.0007 ± 0.0008 higher: 43M parameters, 524,288 tokens per step, six "
            "seeds)",
            "set attention.smooth_k: true",
            f"{_SAGEBWD}, sections 3 and 5; {_SMOOTHING}",
        )
    if warmup_tokens(cfg.lr_schedule, cfg.training.total_tokens) == 0:
        yield About("no_warmup", "lr_schedule.warmup", cfg.lr_schedule.warmup).warning(
            "every published INT8 pretraining warmed the learning rate up, over about 2.5 % of the run",
            "for example lr_schedule.warmup: 0.025",
            f"{_SAGEBWD}, section 5: 1k of 37.5k steps at 2.1M tokens, 7.5k of 300k at 260K",
        )
    if cfg.optimizer.lr > 1e-3:
        yield About("lr_above_published", "optimizer.lr", cfg.optimizer.lr).info(
            "higher than in any published INT8 pretraining: 3e-5, and 1e-3 where INT8 converged visibly slower. "
            "(At 1e-3 our runs did not: 43M parameters, 131K tokens per step, four seeds, a gap above 0.008 excluded)",
            "compare it with a 16-bit attention.backend first: sagetrain compare",
            f"{_SAGEBWD}, section 5; {_SAGE3}; {_RECIPE_GAP}",
        )


def _measured(cfg: RunConfig, run: MeasuredRun) -> Iterator[Finding]:
    """Report the ratio that an earlier run measured, computed for the largest tokens per step of this run. For a run
    with 16-bit attention, report the gradient noise alone."""
    key, tokens = max(cfg.tokens_per_step.named_tokens.items(), key=lambda item: item[1])
    said, source, int8 = [], f"{run.path}, measured", cfg.attention.may_be_int8
    level: Level = "info"
    quantized = int8 or may_be_low_bit(cfg)
    if quantized and (whole := run.ratios.get(ALL)):
        there, here = whole.tokens_per_step, whole.at(tokens)
        said.append(
            f"quantization added {whole.ratio:.2g} of the noise of the weights' gradients at {there:,} tokens "
            f"per step, {max(whole.bias_ratio, 0):.2g} of it bias; at {tokens:,} it would be {here:.2g}"
        )
        if layers := {name: ratio.at(tokens) for name, ratio in run.ratios.items() if name != ALL}:
            worst = max(layers, key=lambda name: layers[name])
            said[-1] += f" (largest in layer {worst}: {layers[worst]:.2g})"
        if critical := critical_tokens(run.ratios, margin_of(cfg.tokens_per_step)):
            said[-1] += f"; {critical_in_words(critical)}"
        if biased := whole.bias_to_gradient is not None and whole.bias_to_gradient > 0:
            said[-1] += (
                f"; on average its bias was {whole.bias_to_gradient:.2g} of the gradient, both squared, with which "
                "went what INT8 attention cost our runs in loss"
            )
        level = "warning" if here > 1 else "info"
        source += "; ratio' = ratio + bias_ratio (tokens' / tokens - 1), sagetrain/config/earlier_run.py"
        source += f"; {_BIAS}" if biased else ""
    if run.noise_scale is not None:
        said.append(
            f"the gradient noise scale was {run.noise_scale:,.0f} tokens: {tokens:,} tokens per step are "
            f"{tokens / run.noise_scale:.2g} of it"
        )
    if not quantized:
        said.append(f"what quantization added is not shown: attention.backend {cfg.attention.backend} is in 16 bits")
    elif int8 and run.errors:
        said.append(_largest(run.errors, "error"))
    if may_be_low_bit(cfg) and run.linear_errors:
        said.append(_largest(run.linear_errors, "error of linear layers"))
    if differing := run.differing(cfg):
        said.append(f"that run differs: {', '.join(differing)}")
    yield About("measured_ratio", key, tokens).found(
        level,
        f"measured in {run.path}: {'; '.join(said)}",
        "use fewer tokens per step, a finer attention.recipe or a 16-bit attention.backend; sagetrain compare shows "
        "whether it costs loss"
        if level == "warning"
        else "",
        source,
    )


def _largest(errors: Mapping[str, float], what: str) -> str:
    worst = max(errors, key=lambda name: errors[name])
    layer, tensor = worst.split("/")
    return f"the largest relative {what} was {errors[worst]:.2g}, of {tensor} in layer {layer}"


def _unknown_overrides(cfg: RunConfig) -> Iterator[Finding]:
    for i, name in enumerate(cfg.guidance.override):
        if name not in RULES:
            near = difflib.get_close_matches(name, RULES, 1)
            yield About("unknown_rule", f"guidance.override.{i}", name).error(
                "no rule has this name", f"did you mean {near[0]}?" if near else f"the rules are {', '.join(RULES)}"
            )
