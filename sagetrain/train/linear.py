"""How linear layers multiply in a run whose settings say `auto`: decided when it begins, kept when it continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sagetrain.config.linear_sizes import LOW_BIT_MULTIPLE
from sagetrain.config.schema import LinearConfig, ModelConfig
from sagetrain.model.selection import cannot_multiply, why_sixteen_bits
from sagetrain.train.attention import recorded

NAMES = ("precision", "recipe", "keep_layers_below")
"""What is decided."""


def kept(asked: LinearConfig, folder: Path) -> LinearConfig:
    """What is asked for, with `auto` as the run of a checkpoint has it: what a layer gained on some day should not
    change a run's arithmetic. A recipe that is named beside it, and a larger keep_layers_below, hold."""
    if asked.precision != "auto":
        return asked
    before = LinearConfig(**recorded(folder, "linear"))
    below = max(asked.keep_layers_below, before.keep_layers_below)
    recipe = before.recipe if before.precision == "fp8" else asked.recipe  # int8 has no recipe tensorwise
    return asked.model_copy(update={"precision": before.precision, "recipe": recipe, "keep_layers_below": below})


def settle(
    asked: LinearConfig,
    model: ModelConfig,
    folder: Path | None,
    *,
    tensor_parallel_size: int,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[[LinearConfig], LinearConfig],
    say: Callable[[str], None],
) -> tuple[LinearConfig, str]:
    """The settings with nothing left to decide, and for those that said `auto` a few words that say why.

    Args:
        folder: of the checkpoint that the run continues from.
        choose: what is fastest here; all ranks call it.
        say: hears why what the run had cannot be kept (on other hardware, say).
    """
    place: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size, "device": device, "dtype": dtype}
    if asked.precision != "auto":
        settled, why = asked, ""
    elif folder and (settled := kept(asked, folder)).precision != "auto":
        why = "as the run had it: auto decides once, the name of a precision changes it"
        if problem := cannot_multiply(settled, model, **place):
            precision = settled.precision
            say(f"linear.precision {precision}, which the run had so far, cannot run here ({problem}): decided anew")
            settled = asked
    else:
        settled = asked
    if settled.precision == "auto":
        if why := why_sixteen_bits(asked, model, **place):
            settled, why = asked.model_copy(update={"precision": "bf16"}), f"auto: {why}"
        else:
            settled, why = choose(asked), "auto: the fastest"
    if folder and settled.low_bit:
        _compare(settled, model, folder, tensor_parallel_size, say)
    return settled, why


def _compare(
    settled: LinearConfig, model: ModelConfig, folder: Path, tensor_parallel_size: int, say: Callable[[str], None]
) -> None:
    """Say which layers multiply in 8 bits where another tensor-parallel size changes that: what decides is a rank's
    sizes."""
    before = LinearConfig(**recorded(folder, "linear"))
    sizes = recorded(folder, "parallel").get("tensor_parallel_size", 1), tensor_parallel_size
    was, now = (
        [name for name, layer in model.linear_layers(size).items() if linear.takes(layer)]
        for linear, size in zip((before, settled), sizes, strict=True)
    )
    if sizes[0] != sizes[1] and before.low_bit and was != now:
        say(f"a rank's sizes decide which linear layers are in 8 bits (linear.keep_layers_below "
            f"{settled.keep_layers_below:,}, sides of multiples of {LOW_BIT_MULTIPLE}): at tensor_parallel_size "
            f"{sizes[1]} {', '.join(now) or 'none'}, so far, at {sizes[0]}, {', '.join(was) or 'none'}")  # fmt: skip
