"""The stability measurements of an earlier run, read from its folder: how much quantization adds to the noise of the
weights' gradients.

sagetrain/stability/quant_noise.py defines the ratio and its parts. At T' tokens per step instead of T, the ratio is

    ratio' = ratio - bias_ratio + bias_ratio T' / T

The noise left in a step falls like 1 / T, and the independent part of the error falls with it; the bias stays.
Micro-batches are as large as in the run that measured. The ratio therefore reaches a margin at

    T_x = T (margin - (ratio - bias_ratio)) / bias_ratio

tokens per step. There is no such T_x if no part of the ratio is bias. T_x is 0 if the part without bias alone is above
the margin.
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
from sagetrain.config.schema import NoiseAwareTokens, RunConfig, Section

STABILITY_NAME = "stability.json"
"""The file in the run folder that holds the measurements; cluster/run_folder.py writes it."""
CRITICAL = "critical_tokens_per_step"
"""The key of that file that holds the result of critical_tokens."""
ALL = "all"
"""The name of the whole model among the layers."""


@dataclass(frozen=True)
class Ratio:
    """The squared error of the quantized weight gradients, divided by the gradient noise that is left in a step."""

    ratio: float
    bias_ratio: float
    """The part of the ratio that micro-batches have in common. This is bias, which more tokens per step do not average
    out."""
    tokens_per_step: int
    """The tokens per step at which the ratio was measured."""
    bias_to_gradient: float | None = None
    """The bias divided by the gradient itself, both squared: the mean of the run's probes."""

    def at(self, tokens_per_step: int) -> float:
        """Return the ratio at other tokens per step, by the module's formula."""
        return self.ratio + self._bias * (tokens_per_step / self.tokens_per_step - 1)

    def critical(self, margin: float) -> float:
        """Return T_x, the tokens per step at which the ratio is `margin`. Infinity: it never gets there. 0: it is
        always above."""
        if self._bias == 0:
            return math.inf if self.ratio <= margin else 0.0
        return max(0.0, self.tokens_per_step * (margin - self.ratio + self._bias) / self._bias)

    @property
    def _bias(self) -> float:
        """The bias part of the ratio. The measured value is an estimate, and may be below 0 where there is hardly any
        bias."""
        return max(self.bias_ratio, 0.0)


def ratios_of(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Ratio]:
    """Return the ratio of each layer, and of the whole model (key ALL), from the metrics of stability.json. Raises
    KeyError if the metrics have a ratio without its parts."""
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


def margin_of(schedule: Section) -> float:
    """Return the margin of the noise_aware schedule. Other schedules get its default."""
    if isinstance(schedule, NoiseAwareTokens):
        return schedule.margin
    margin: float = NoiseAwareTokens.model_fields["margin"].default
    return margin


def critical_tokens(ratios: Mapping[str, Ratio], margin: float) -> dict[str, Any] | None:
    """Return T_x as stability.json has it, in whole tokens per step.

    Returns:
        {"margin": the margin, "all": T_x of the whole model, "layer": the worst layer, "worst": T_x of that layer}. A
        T_x of None means that the margin is never reached. None in place of the dict means that nothing was measured.
    """
    layers = {layer: ratio.critical(margin) for layer, ratio in ratios.items() if layer != ALL}
    if not layers or ALL not in ratios:
        return None
    worst = min(layers, key=lambda layer: layers[layer])
    found = {"all": ratios[ALL].critical(margin), "worst": layers[worst]}
    whole = {name: int(tokens) if math.isfinite(tokens) else None for name, tokens in found.items()}
    return {"margin": margin, "all": whole["all"], "layer": worst, "worst": whole["worst"]}


def critical_in_words(critical: Mapping[str, Any]) -> str:
    """Return the result of critical_tokens as text: "T_x 1,024 (layer 3: 512) tokens per step, where it is 0.1"."""
    said = [f"{critical[name]:,}" if critical[name] is not None else "infinite" for name in ("all", "worst")]
    return f"T_x {said[0]} (layer {critical['layer']}: {said[1]}) tokens per step, where it is {critical['margin']:g}"


@dataclass(frozen=True)
class MeasuredRun:
    """The last measurements of a run."""

    path: str
    ratios: dict[str, Ratio]
    """The ratio of each layer, and of the whole model under the key ALL."""
    noise_scale: float | None
    """The gradient noise scale of the whole model, in tokens."""
    errors: dict[str, float]
    """The relative L2 error of each tensor of INT8 attention, by `layer/tensor`."""
    linear_errors: dict[str, float]
    """The relative L2 error of each tensor of 8-bit linear layers, by `layer/name.tensor`."""
    settings: dict[str, dict[str, Any]]
    """The run's configuration, by section."""

    def differing(self, cfg: RunConfig) -> list[str]:
        """Return `key theirs there, ours here` for each setting that the measurement depends on and that differs."""
        ours = cfg.model_dump(mode="json")
        return [
            f"{section}.{key} {value} there, {ours[section][key]} here"
            for section in ("model", "attention", "linear", "optimizer")
            for key, value in self.settings.get(section, {}).items()
            if key in ours[section] and ours[section][key] != value
        ]


def read_measured(path: str | Path) -> MeasuredRun:
    """Read the measurements of the run in a folder. Raises ConfigError if the folder is not a run folder, or nothing
    was measured there."""
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
