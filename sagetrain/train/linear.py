"""How linear layers multiply in a run whose settings say `auto`: decided when it begins, kept when it continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sagetrain.config.schema import LinearConfig, ModelConfig
from sagetrain.model.selection import matmuls_of, why_sixteen_bits
from sagetrain.train.attention import recorded

NAMES = ("precision", "recipe", "keep_layers_below")
"""What is decided."""


def kept(asked: LinearConfig, folder: Path) -> LinearConfig:
    """What is asked for, with `auto` as the run of a checkpoint has it: what a layer gained on some day should not
    change a run's arithmetic."""
    before = LinearConfig(**recorded(folder, "linear"))
    if asked.precision != "auto":
        return asked
    below = max(asked.keep_layers_below, before.keep_layers_below)
    return asked.model_copy(update={**before.model_dump(include={*NAMES}), "keep_layers_below": below})


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
    if asked.precision != "auto":
        return asked, ""
    settled = kept(asked, folder) if folder else asked
    if settled.precision != "auto":
        try:
            matmuls_of(settled, model, device=device, dtype=dtype)
        except ValueError as error:
            say(f"linear.precision {settled.precision}, which auto was so far, cannot run here ({error}): decided anew")
        else:
            return settled, "as the run had it: auto decides once, names of precision and recipe change it"
    tp_size = tensor_parallel_size
    if why := why_sixteen_bits(asked, model, tensor_parallel_size=tp_size, device=device, dtype=dtype):
        return asked.model_copy(update={"precision": "bf16", "recipe": "rowwise"}), f"auto: {why}"
    return choose(asked), "auto: the fastest"
