"""Rules for the precision ladder: rungs in their order, and something that moves layers between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from sagetrain.config.arithmetic import may_be_low_bit
from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import error, no_effect, warning
from sagetrain.config.schema import PrecisionConfig, RunConfig

# A rung with less in INT8 has the greater number. Rungs with the same number cannot be on one ladder.
_ORDER = {"paper": 0, "fine": 1, "scores": 2, "gradients": 2, "sdpa": 3, "flash": 3, "reference": 3}
_16_BIT = 3
_KEY = "stability.precision"
# These numbers of single layers are larger where INT8 does more harm.
_METRICS = (
    r"quant/\*/(O|delta|P|dP|dS|dQ|dK|dV)/rel_l2|quant/\*/dS/zero_share_d[QK]|quant/\*/S/largest|"
    r"quant/\*/[QK]/gain_(mean|max)|quant_noise/\*/((bias_)?ratio|bias_to_gradient)"
)


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find ladders without a lowest rung, ladders that end in INT8, and ladders that no layer climbs."""
    precision = cfg.stability.precision
    if precision is None:
        return
    yield from _lowest(cfg)
    yield from _rungs(cfg, precision)
    yield from _floors(cfg, precision)
    yield from _threshold(cfg, precision)
    if not (precision.floors or precision.threshold or precision.spike_tokens):
        yield no_effect(_KEY, precision.rungs, "no floors, threshold or spike_tokens: no layer ever moves")


def _lowest(cfg: RunConfig) -> Iterator[Finding]:
    attention = cfg.attention
    if attention.backend != "sage":
        why = (
            "times one attention for all layers, while a ladder gives each layer its own"
            if attention.backend == "auto"
            else "quantizes nothing: there is no lower rung than that"
        )
        yield error(
            "precision_backend",
            "attention.backend",
            attention.backend,
            f"{why}, and {_KEY} is set",
            f"set attention.backend: sage, or remove {_KEY}",
        )
    elif attention.recipe == "auto":
        yield error(
            "precision_recipe",
            "attention.recipe",
            "auto",
            f"does not say what the lowest rung of {_KEY} is, and which rungs are above it",
            "name it: attention.recipe paper or fine",
        )


def _rungs(cfg: RunConfig, precision: PrecisionConfig) -> Iterator[Finding]:
    ladder = [cfg.attention.recipe, *precision.rungs]
    for i, (lower, higher) in enumerate(pairwise(ladder)):
        if lower != "auto" and _ORDER[higher] <= _ORDER[lower]:
            below = "attention.recipe" if i == 0 else "the rung before it"
            yield error(
                "precision_order",
                f"{_KEY}.rungs.{i}",
                higher,
                f"is not above {lower}, {below}: each rung has to quantize less than the one before",
                "take an order such as paper, fine, gradients, sdpa; of scores and gradients one, of 16-bit backends "
                "one",
            )
    last = precision.rungs[-1]
    if _ORDER[last] < _16_BIT:
        yield error(
            "precision_16_bit",
            f"{_KEY}.rungs",
            precision.rungs,
            f"ends with {last}, which quantizes: a ladder has to end where no error of INT8 is left",
            "add a 16-bit backend at the end: sdpa or flash",
        )
    if "flash" in precision.rungs and cfg.training.dtype == "fp32":
        yield error(
            "flash_needs_16_bits",
            f"{_KEY}.rungs.{precision.rungs.index('flash')}",
            "flash",
            "flash-attn takes bf16 only, training.dtype is fp32",
            "use training.dtype bf16, or the rung sdpa",
        )


def _floors(cfg: RunConfig, precision: PrecisionConfig) -> Iterator[Finding]:
    layers = cfg.model.num_layers
    for i, floor in enumerate(precision.floors):
        key = f"{_KEY}.floors.{i}"
        if floor.rung not in precision.rungs:
            yield error(
                "precision_rung",
                f"{key}.rung",
                floor.rung,
                f"is not one of {_KEY}.rungs: {', '.join(precision.rungs)}",
                "add it there, or name one of them",
            )
        for name in ("first_layers", "last_layers"):
            if (count := getattr(floor, name)) > layers:
                yield error(
                    "precision_layers",
                    f"{key}.{name}",
                    count,
                    f"is more than the model's {layers} layers",
                    f"use at most {layers}, or leave out both first_layers and last_layers to mean all",
                )


def _threshold(cfg: RunConfig, precision: PrecisionConfig) -> Iterator[Finding]:
    threshold = precision.threshold
    if threshold is None:
        return
    key = f"{_KEY}.threshold"
    source = "monitor" if threshold.metric.startswith("quant/") else "quant_noise"
    if not re.fullmatch(_METRICS, threshold.metric):
        yield error(
            "precision_metric",
            f"{key}.metric",
            threshold.metric,
            "is no number of single layers that grows with the error of quantization",
            "name one with * for the layer: quant/*/dS/rel_l2 or another rel_l2, quant_noise/*/ratio, bias_ratio or "
            "bias_to_gradient",
        )
    elif getattr(cfg.stability, source).every_steps is None:
        yield error(
            "precision_unmeasured",
            f"{key}.metric",
            threshold.metric,
            f"is not measured: stability.{source}.every_steps is null",
            f"set stability.{source}.every_steps, to {100 if source == 'monitor' else 500} for instance",
        )
    elif source == "monitor":
        yield from _observed(cfg, precision.rungs, threshold.metric)
    elif may_be_low_bit(cfg):
        yield warning(
            "precision_counts_linear",
            f"{key}.metric",
            threshold.metric,
            "counts what linear layers in 8 bits add to gradients, too, which no rung of attention takes away",
            "use a number of attention alone, quant/*/dS/rel_l2 for instance, or linear.precision bf16",
        )
    if threshold.below is not None and threshold.below >= threshold.above:
        yield error(
            "precision_hysteresis",
            f"{key}.below",
            threshold.below,
            f"is not below {key}.above {threshold.above}: layers would go up and down for ever",
            f"use at most half of it, {threshold.above / 2:g}",
        )
    elif threshold.below is not None and threshold.cooldown_tokens == 0:
        yield warning(
            "precision_cooldown",
            f"{key}.cooldown_tokens",
            0,
            "a layer that reached 16 bits is tried lower in the very next step",
            "let a cool-down be some hundred steps of tokens",
        )


def _observed(cfg: RunConfig, rungs: Sequence[str], metric: str) -> Iterator[Finding]:
    """Find thresholds on metrics that the monitor does not measure in this run, or measures in some layers alone."""
    why, fix = "", ""
    if "/gain_" in metric and cfg.attention.qk_norm == "none":
        why, fix = (
            "is not measured, as attention.qk_norm is none: no layer would ever move",
            "set attention.qk_norm: before_rope or after_rope, or name another metric",
        )
    elif "/zero_share_" in metric and "scores" in (cfg.attention.recipe, *rungs):
        why, fix = (
            "is not measured of recipe scores, which keeps dS in 16 bits: no threshold moves a layer on from there",
            "name another metric, such as quant/*/dS/rel_l2, or use gradients in the place of scores",
        )
    if why:
        yield error("precision_unmeasured", f"{_KEY}.threshold.metric", metric, why, fix)
    layers, count = cfg.stability.monitor.layers, cfg.model.num_layers
    if layers != "all" and len({layer % count for layer in layers}) < count:
        yield warning(
            "precision_unmeasured",
            "stability.monitor.layers",
            layers,
            f"{_KEY}.threshold.metric {metric} is measured there alone: the threshold moves no other layer",
            "use all, or give the others a rung by floors",
        )
