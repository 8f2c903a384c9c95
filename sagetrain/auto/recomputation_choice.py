"""Choose how much the backward pass recomputes: training.activation_checkpointing auto. No torch, because plans choose
as well."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from sagetrain.config.schema import Recomputation

_SELECTIVE = 0.4
"""`selective` takes about as long as this share of the blocks, recomputed as wholes: by `sagetrain plan`, for 1B with
linear layers in INT8."""


def fewest_blocks(num_layers: int, fits: Callable[[Recomputation], bool]) -> int:
    """Return the smallest number of blocks whose recomputation makes a run fit into memory, or num_layers if none
    does."""
    if fits(0):
        return 0
    # More blocks take less memory, but the first one takes room for a block's activations.
    return 1 + bisect.bisect_left(range(1, num_layers), True, key=fits)


def least_recomputation(num_layers: int, fits: Callable[[Recomputation], bool]) -> Recomputation:
    """Return the setting that recomputes least among those with which a run fits into memory, by the estimate of
    `sagetrain plan`."""
    blocks = fewest_blocks(num_layers, fits)
    if blocks > _SELECTIVE * num_layers and fits("selective"):
        return "selective"
    return "none" if blocks == 0 else "full" if blocks == num_layers else blocks
