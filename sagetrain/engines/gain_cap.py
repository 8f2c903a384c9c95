"""The cap on the learned gains of QK-norm (stability.qk_gain.cap), held after every step."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from sagetrain.model.norm import is_qk_gain

if TYPE_CHECKING:
    from sagetrain.engines.masters import Masters


@torch.no_grad()
def count(engine: Masters, cap: float) -> None:
    """Add the share of the gains that are at the cap, while a step runs, to its numbers."""
    gains = [shard.tensors["weight"] for shard in engine.shards(is_qk_gain) if shard.tensors]
    every = torch.cat(gains) if gains else torch.zeros(0, device=engine.device)
    engine.groups.metrics.derive("qk_gain/capped_share", operator.truediv, (every.abs() >= cap).sum(), len(every))


@torch.no_grad()
def clip(engine: Masters, cap: float) -> None:
    """Clip them: the fp32 masters, and what the model computes with, which is what their rounding would be. Ranks that
    hold the same gains clip the same."""
    shards = list(engine.shards(is_qk_gain))
    values = [values for shard in shards for values, _ in engine.weights(shard)]
    if engine.stage == 3:  # small parameters stay gathered; of others this is empty
        values += [shard.parameter.data.view(-1) for shard in shards]
    torch._foreach_clamp_max_(values, cap)
    torch._foreach_clamp_min_(values, -cap)
