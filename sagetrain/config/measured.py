"""What an earlier run measured about its stability, read from its folder: what quantization adds to the gradients of
weights, against the noise that they have anyway.

sagetrain/stability/quant_noise.py defines the ratio and its parts. At n' micro-batches a step instead of n, it says,

    ratio' = ratio - bias_ratio + bias_ratio n' / n

since the noise left in a step falls like 1 / n, the independent part of the error with it, and the bias stays. Micro-
batches are as large as those of the run that measured: n' / n is the quotient of the tokens per step T' and T. So the
ratio reaches a margin at

    T_x = T (margin - (ratio - bias_ratio)) / bias_ratio

tokens per step: at none where nothing of it is bias, and at any where what is no bias is above the margin by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagetrain.config import yaml_nodes
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import NoiseAwareTokens, RunConfig

STABILITY_NAME = "stability.json"
"""In the run folder; cluster/run_folder.py writes it."""
CRITICAL = "critical_tokens_per_step"
"""In it, what critical_tokens gives."""
ALL = "all"
"""What the whole model is called among the layers."""


@dataclass(frozen=True)
class Ratio:
    """Squared error of the quantized weight gradients over the gradient noise that is left in a step."""

    ratio: float
    bias_ratio: float
    """The part of it that micro-batches have in common: bias, which more tokens per step do not average."""
    tokens_per_step: int
    """At which it was measured."""
    bias_to_gradient: float | None = None
    """That bias beside the gradient itself, both squared: mean of the run's probes."""

    def at(self, tokens_per_step: int) -> float:
        """What it would be, by the formula above."""
        return self.ratio + self._bias * (tokens_per_step / self.tokens_per_step - 1)

    def critical(self, margin: float) -> float:
        """T_x: tokens per step at which it would be `margin`; inf: no number is large enough, 0: none small enough."""
        if self._bias == 0:
            return math.inf if self.ratio <= margin else 0.0
        return max(0.0, self.tokens_per_step * (margin - self.ratio + self._bias) / self._bias)

    @property
    def _bias(self) -> float:
        """An estimate, which may be below 0 where there is hardly any."""
        return max(self.bias_ratio, 0.0)


def ratios_of(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Ratio]:
    """By layer, from the metrics of stability.json; ALL: of the whole model. Raises KeyError of other metrics."""
    return {
        layer: Ratio(
            entry["last"],
            metrics[f"quant_noise/{layer}/bias_ratio"]["last"],
            entry["tokens_per_step"],
            metrics.get(f"quant_noise/{layer}/bias_to_gradient", {}).get("mean"),
        )
        for name, entry in metrics.items()
        if name.startswith("quant_noise/") and name.endswith("/ratio")
        for layer in [name.split("/")[1]]
    }


def margin_of(cfg: RunConfig) -> float:
    """Of tokens_per_step, noise_aware's default under other schedules."""
    if isinstance(cfg.tokens_per_step, NoiseAwareTokens):
        return cfg.tokens_per_step.margin
    margin: float = NoiseAwareTokens.model_fields["margin"].default
    return margin


def critical_tokens(ratios: Mapping[str, Ratio], margin: float) -> dict[str, Any] | None:
    """T_x as stability.json has it: {"margin", "all": of the whole model, "layer": the worst one, "worst": T_x of it},
    in whole tokens per step. None in the place of a number: it is never reached. None instead: nothing was measured."""
    layers = {layer: ratio.critical(margin) for layer, ratio in ratios.items() if layer != ALL}
    if not layers or ALL not in ratios:
        return None
    worst = min(layers, key=lambda layer: layers[layer])
    found = {"all": ratios[ALL].critical(margin), "worst": layers[worst]}
    whole = {name: int(tokens) if math.isfinite(tokens) else None for name, tokens in found.items()}
    return {"margin": margin, "all": whole["all"], "layer": worst, "worst": whole["worst"]}


def critical_in_words(critical: Mapping[str, Any]) -> str:
    """The same: "T_x 1,024 (layer 3: 512) tokens per step, where it is 0.1"."""
    said = [f"{critical[name]:,}" if critical[name] is not None else "infinite" for name in ("all", "worst")]
    return f"T_x {said[0]} (layer {critical['layer']}: {said[1]}) tokens per step, where it is {critical['margin']:g}"


@dataclass(frozen=True)
class MeasuredRun:
    """The last measurements of a run."""

    path: str
    ratios: dict[str, Ratio]
    """By layer; ALL: of the whole model."""
    noise_scale: float | None
    """Gradient noise scale of the whole model, in tokens."""
    errors: dict[str, float]
    """Relative L2 error of what INT8 attention computes, by `layer/tensor`."""
    linear_errors: dict[str, float]
    """And of linear layers in 8 bits, by `layer/name.tensor`."""
    settings: dict[str, dict[str, Any]]
    """Of the run, by section."""

    def differing(self, cfg: RunConfig) -> list[str]:
        """`key: theirs, here ours`, for what the measurement depends on."""
        ours = cfg.model_dump(mode="json")
        return [
            f"{section}.{key} {value} there, {ours[section][key]} here"
            for section in ("model", "attention", "linear", "optimizer")
            for key, value in self.settings.get(section, {}).items()
            if key in ours[section] and ours[section][key] != value
        ]


def read_measured(path: str | Path) -> MeasuredRun:
    """What the run in a folder has measured.

    Raises:
        ConfigError: no run folder, or nothing was measured there.
    """
    folder = Path(path)
    try:
        metrics = json.loads((folder / STABILITY_NAME).read_text())["metrics"]
        settings, _, _ = yaml_nodes.parse((folder / "config.yaml").read_text())
        ratios = ratios_of(metrics)
        errors = {
            "/".join(name.split("/")[1:3]): entry["last"]
            for name, entry in metrics.items()
            if name.startswith("quant/") and name.endswith("/rel_l2")
        }
        linear = {name: errors.pop(name) for name in [*errors] if "." in name}
        scale = metrics.get(f"noise/{ALL}/scale_tokens", {}).get("last")
    except OSError as error:
        raise ConfigError(
            f"--measured {folder}: {error.filename}: {error.strerror}; name the folder of a run (its training.run_dir) "
            f"that has saved a checkpoint: {STABILITY_NAME} is written with it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--measured {folder}: {STABILITY_NAME} is not what a run writes ({error!r})") from error
    if not (ratios or errors or linear or scale is not None):
        raise ConfigError(
            f"--measured {folder}: the run measured neither its gradient noise nor what INT8 attention loses; turn "
            "that on (section stability of `sagetrain plan --keys`) and take steps of more than one micro-batch"
        )
    return MeasuredRun(str(folder), ratios, scale, errors, linear, settings if isinstance(settings, dict) else {})
