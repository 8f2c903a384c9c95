"""Which attention a run has where its settings say `auto`: decided when it begins, and kept when it continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.backends import FIXED_RECIPE
from sagetrain.model.selection import resolve_backend, to_be_chosen
from sagetrain.train import checkpoint


def recorded(folder: Path, section: str) -> dict[str, Any]:
    """Return what the run of a checkpoint had of a section of its configuration."""
    state: dict[str, dict[str, Any]] = checkpoint.read_manifest(folder)["state"]
    if section not in state:  # an import decides nothing: as its configuration asks
        state = yaml.safe_load((folder / "config.yaml").read_text())
    return state.get(section, {})


def kept(asked: AttentionConfig, folder: Path) -> AttentionConfig:
    """What is asked for, with `auto` as the run of a checkpoint has it: how long a kernel took on some day should not
    change a run's arithmetic. What the checkpoint does not say stays `auto`."""
    before, settled = recorded(folder, "attention"), {}
    if asked.backend == "auto":
        settled["backend"] = before["backend"]
    if asked.recipe == "auto" and before["backend"] == "sage":
        settled["recipe"] = before["recipe"]
    return asked.model_copy(update=settled)


def settle(
    asked: AttentionConfig,
    model: ModelConfig,
    folder: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[[AttentionConfig], AttentionConfig],
    say: Callable[[str], None],
) -> tuple[AttentionConfig, str]:
    """The settings with nothing left to decide, and one line that says why or how.

    Args:
        folder: of the checkpoint that the run continues from.
        choose: what is fastest here, for settings of which backend or recipe is `auto`; all ranks call it.
        say: hears why what the run had cannot be kept (on other hardware, say).

    Raises:
        ValueError: as resolve_backend.
    """
    settled = kept(asked, folder) if folder else asked
    try:
        backend, why = resolve_backend(settled, model, device=device, dtype=dtype)
    except ValueError as error:
        if settled == asked:
            raise
        say(f"attention.backend {settled.backend}, which auto was so far, cannot run here ({error}): decided anew")
        settled = asked
        backend, why = resolve_backend(settled, model, device=device, dtype=dtype)
    if settled != asked:
        why += "; as the run had it: auto decides once, names of backend and recipe change it"
    settled = settled.model_copy(update={"backend": backend})
    if to_be_chosen(settled, device):
        settled, why = choose(settled), "the fastest that was admitted"
        if settled.backend == "sage":
            why = f"INT8 recipe {settled.recipe}: {why}"
    if settled.recipe == "auto":
        settled = settled.model_copy(update={"recipe": FIXED_RECIPE})
    return settled, why
