"""The choices of the run that wrote a checkpoint. A run that continues it keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import RunState, SettledAttention, SettledLinear, SettledOverlap
from sagetrain.config.schema import AttentionConfig, LinearConfig


@dataclass(frozen=True)
class Kept:
    """The choices of a run. A choice that its checkpoint does not record is the one that its configuration asks for: an
    import decides nothing."""

    attention: SettledAttention
    linear: SettledLinear
    overlap: SettledOverlap | None
    """The choice about halves. None: the run has not decided."""
    tensor_parallel_size: int

    @classmethod
    def by(cls, folder: Path) -> Kept:
        """Read the choices of the run that wrote the checkpoint in `folder`."""
        return cls.of(on_disk.read_state(folder), yaml.safe_load((folder / "config.yaml").read_text()))

    @classmethod
    def of(cls, state: RunState, asked: dict[str, dict[str, Any]]) -> Kept:
        """Put together the choices of a state, and the configuration that its run was asked for."""
        attention, linear = {**_ATTENTION, **asked.get("attention", {})}, {**_LINEAR, **asked.get("linear", {})}
        return cls(
            state.attention or SettledAttention(attention["backend"], attention["recipe"]),
            state.linear or SettledLinear(linear["precision"], linear["recipe"], linear["keep_layers_below"]),
            state.overlap,
            asked.get("parallel", {}).get("tensor_parallel_size", 1),
        )


_ATTENTION, _LINEAR = AttentionConfig().model_dump(), LinearConfig().model_dump()


def kept_attention(asked: AttentionConfig, before: SettledAttention) -> AttentionConfig:
    """Return the settings with `auto` as the run had it. How long a kernel took on some day should not change a run's
    arithmetic. A setting that the run does not record stays `auto`."""
    settled = {}
    if asked.backend == "auto":
        settled["backend"] = before.backend
    if asked.recipe == "auto" and before.backend == "sage":
        settled["recipe"] = before.recipe
    return asked.model_copy(update=settled)


def kept_linear(asked: LinearConfig, before: SettledLinear) -> LinearConfig:
    """Return the settings with `auto` as the run had it. How much a layer gained on some day should not change a run's
    arithmetic. A recipe that is named beside `auto`, and a larger keep_layers_below, hold."""
    if asked.precision != "auto":
        return asked
    below = max(asked.keep_layers_below, before.keep_layers_below)
    recipe = before.recipe if before.precision == "fp8" else asked.recipe  # int8 has no recipe tensorwise
    return asked.model_copy(update={"precision": before.precision, "recipe": recipe, "keep_layers_below": below})
