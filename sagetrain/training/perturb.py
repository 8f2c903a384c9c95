"""Apply training.perturb: give the weights another rounding when a run begins or continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sagetrain.engines.step import Engine

GAINS = "blocks.0.attention_norm.gain", "blocks.0.attention_post_norm.gain"
"""The gain of which one channel is changed: the first that the model has."""


@torch.no_grad()
def perturb(engine: Engine, channel: int) -> None:
    """Replace one gain of the first block's norm, that of a channel from 1, by the next larger number in the model's
    dtype; collective. Channel 0 changes none. Where norms multiply by 1 + gain, that sum becomes the next larger
    number. The number next to 0 is lost in a sum."""
    if not channel:
        return
    dtype, place = next(iter(engine.leaves().values())).dtype, channel - 1
    name = next(name for name in GAINS if name in engine.model.every_spec)
    base = int(engine.model.config.conventions == "gemma")
    for kept in engine.owned(lambda spec: spec.name == name):
        if kept.start <= place < kept.stop:
            master = kept.weight[place - kept.start]
            factor = base + master.to("cpu", dtype)
            master.copy_(torch.nextafter(factor, torch.full_like(factor, torch.inf)) - base)
    engine.state_changed()
