"""The order of the work on each stage of a pipeline. No torch.

The order is 1F1B: after a warm-up, a stage alternates between the forward pass of one micro-batch and the backward pass
of another. A stage with several chunks interleaves them (interleaved 1F1B). The order exists for any number of
micro-batches.
"""

from __future__ import annotations

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


def orders(ranks: int, per_rank: int, micros: int, backward: bool = True) -> list[list[Action]]:
    """Return the actions of every stage, in the order in which the stage does them.

    Micro-batches go through the chunks in rounds. A round has as many micro-batches as there are stages, or a few more
    if the rounds would not come out even.

    Args:
        ranks: the number of stages.
        per_rank: the number of chunks on each stage.
        micros: the number of micro-batches.
        backward: whether backward passes follow the forward passes.
    """
    rounds = max(1, micros // ranks)
    bounds = [micros * number // rounds for number in range(rounds + 1)]
    batches = [range(low, high) for low, high in pairwise(bounds)]
    found = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        forward = [Action("forward", chunk, micro) for some in batches for chunk in own for micro in some]
        if not backward:
            found.append(forward)
            continue
        back = [Action("backward", chunk, micro) for some in batches for chunk in reversed(own) for micro in some]
        # The warm-up ends when the first gradient can be there.
        ahead = ranks - rank - 1
        if per_rank > 1:
            ahead = 2 * ahead + (per_rank - 1) * len(max(batches, key=len))
        ahead = min(ahead, len(forward))
        steady = [action for pair in zip(forward[ahead:], back, strict=False) for action in pair]
        found.append([*forward[:ahead], *steady, *back[len(forward) - ahead :]])
    return found


def in_flight(order: Sequence[Action]) -> int:
    """Return the largest number of forward passes whose activations a stage keeps at once."""
    kept = most = 0
    for action in order:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most
