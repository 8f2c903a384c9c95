"""Whether a run takes its micro-batches in two halves where parallel.tensor_parallel_overlap says `auto`: timed when
the run begins, kept when it continues in the same layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from sagetrain.config.schema import RunConfig
from sagetrain.model.accounting import overlaps, parts_of
from sagetrain.train.attention import recorded

Choice = Literal["auto", "on", "off"]


def record(settled: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint says of the choice: the choice, and the layout that it was made for."""
    return {"choice": settled.parallel.tensor_parallel_overlap, "layout": _layout(settled)}


def settle(
    cfg: RunConfig,
    folder: Path | None,
    *,
    device: torch.device,
    choose: Callable[[], bool],
) -> tuple[Choice, str]:
    """Return `on` or `off`, and a few words that say why where `auto` had a choice.

    Halves add up gradients in another order, so a run that continues in the layout of its checkpoint keeps what it had.

    Args:
        cfg: with attention and linear layers settled.
        folder: the checkpoint that the run continues from.
        choose: times both ways; all ranks call it.
    """
    asked = cfg.parallel.tensor_parallel_overlap
    tokens = cfg.data.micro_batch_size * cfg.data.seq_length // cfg.parallel.context_parallel_size
    if asked != "auto":
        return asked, ""
    if parts_of(tokens, cfg.parallel.tensor_parallel_size, True) == 1:
        return "off", ""
    if folder and (before := recorded(folder, "overlap")) and before["layout"] == _layout(cfg):
        return before["choice"], "as the run had it"
    if device.type != "cuda":
        return ("on" if overlaps(cfg) else "off"), "by the work of a block: nothing is timed without a GPU"
    return ("on" if choose() else "off"), "the faster way"


def _layout(cfg: RunConfig) -> dict[str, Any]:
    """Return what else decides about the order of sums of a micro-batch."""
    names = "tensor_parallel_size", "context_parallel_size", "sequence_parallel"
    layout = {name: getattr(cfg.parallel, name) for name in names}
    return {**layout, "micro_batch_size": cfg.data.micro_batch_size}
