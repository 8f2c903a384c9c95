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
    """Replace one gain of the first block's norm by the next larger number in the model's dtype; collective.

    Args:
        channel: the channel of that gain, from 1; 0: no gain is changed.
    """
    if not channel:
        return
    dtype, place = next(iter(engine.leaves().values())).dtype, channel - 1
    name = next(name for name in GAINS if name in engine.model.every_spec)
    for kept in engine.owned(lambda spec: spec.name == name):
        if kept.start <= place < kept.stop:
            master = kept.weight[place - kept.start]
            gain = master.to("cpu", dtype)
            master.copy_(torch.nextafter(gain, torch.full_like(gain, torch.inf)))
    engine.state_changed()
