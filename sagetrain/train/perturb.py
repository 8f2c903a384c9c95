"""training.perturb: weights in another rounding, where a run begins or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sagetrain.engines.deepspeed import Engine

GAIN = "blocks.0.attention_norm.gain"


@torch.no_grad()
def perturb(engine: Engine, channel: int) -> None:
    """Give one gain of the first block's norm the next number above it in the model's dtype; collective.

    channel: of that gain, the first is 1; 0: none.
    """
    if not channel:
        return
    for shard in engine.shards(lambda spec: spec.name == GAIN):
        place = channel - 1
        if shard.tensors and shard.start <= place < shard.stop:
            master = shard.tensors["weight"][place - shard.start]
            gain = master.to("cpu", shard.parameter.dtype)
            master.copy_(torch.nextafter(gain, torch.full_like(gain, torch.inf)))
    engine.state_changed()
