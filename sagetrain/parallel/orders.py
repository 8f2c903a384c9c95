"""The order of the work on each stage of a pipeline. No torch.

The order is 1F1B: after a warm-up, a stage alternates between the forward pass of one micro-batch and the backward pass
of another. A stage with several chunks interleaves them (interleaved 1F1B). The order exists for any number of
micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One piece of work of a stage: the forward or backward pass of a micro-batch through a chunk."""

    kind: Literal["forward", "backward"]
    chunk: int
    """The number of the chunk in the model, from 0."""
    micro: int
    """The number of the micro-batch, from 0."""


# A run has few numbers of micro-batches at a time, and takes many steps with each.
@functools.lru_cache(maxsize=8)
def order_of(stage: int, stages: int, per_stage: int, micros: int, backward: bool = True) -> tuple[Action, ...]:
    """Return the actions of one stage, in the order in which the stage does them.

    Micro-batches go through the chunks in rounds. A round has as many micro-batches as there are stages, or a few more
    if the rounds would not come out even.

    Args:
        per_stage: the number of chunks on each stage.
        micros: the number of micro-batches.
        backward: whether backward passes follow the forward passes.
    """
    rounds = max(1, micros // stages)
    bounds = [micros * number // rounds for number in range(rounds + 1)]
    batches = [range(low, high) for low, high in pairwise(bounds)]
    own = range(stage, stages * per_stage, stages)
    forward = tuple(Action("forward", chunk, micro) for some in batches for chunk in own for micro in some)
    if not backward:
        return forward
    back = [Action("backward", chunk, micro) for some in batches for chunk in reversed(own) for micro in some]
    # The warm-up ends when the first gradient can be there.
    ahead = stages - stage - 1
    if per_stage > 1:
        ahead = 2 * ahead + (per_stage - 1) * len(max(batches, key=len))
    ahead = min(ahead, len(forward))
    steady = [action for pair in zip(forward[ahead:], back, strict=False) for action in pair]
    return *forward[:ahead], *steady, *back[len(forward) - ahead :]


def orders(stages: int, per_stage: int, micros: int, backward: bool = True) -> list[tuple[Action, ...]]:
    """Return the actions of every stage: see `order_of`."""
    return [order_of(stage, stages, per_stage, micros, backward) for stage in range(stages)]


def in_flight(order: Sequence[Action]) -> int:
    """Return the largest number of forward passes whose activations a stage keeps at once."""
    kept = most = 0
    for action in order:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most
