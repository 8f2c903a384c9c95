"""The way of tokens to the experts of other ranks, and of the results back.

Either all tokens are gathered, and the results are added up. Or a token goes to the rank of each expert that it has
chosen, by an all-to-all, and its results come back in the same way (config.layout.by_rows).

No shape depends on what routers choose, so the host waits for nothing. There is memory for so many rows, and rows
beyond them are left out, which a flag notes (engines/room.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sagekernels.grouped import combine, gather, plan_rows
from sagetrain.config.layout import by_rows
from sagetrain.parallel.collectives import (
    exchange,
    exchanged,
    finish,
    gather_tokens,
    scatter_sums,
    start_all_gather,
    start_all_reduce,
)
from sagetrain.parallel.topology import ParallelGroups

_Run = Callable[..., Tensor]
"""The experts of a rank: tokens, factors of their choices, rows, and the number of tokens of all ranks where rows take
the place of tokens -> the sum of each token's experts."""


def parts_in(room: int, ranks: int, top: int, own: int) -> int:
    """Return the number of parts in which tokens can go to experts one after the other, so that no part has more rows
    than the room, whatever routers choose.

    Args:
        room: the rows that there is memory for, in hundredths of the mean over ranks.
        ranks: the number of ranks that have the experts between them.
        top: the number of a token's experts.
        own: the number of experts of a rank.
    """
    most = ranks * min(top, own) / top if by_rows(ranks, top) else ranks
    return math.ceil(100 * most / room)


def among_ranks(
    run: _Run, x: Tensor, weights: Tensor, choices: Tensor, own: int, groups: ParallelGroups, room: int | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of each token's experts [T, hidden], and whether rows had no memory, bool [].

    Args:
        x: the tokens of this rank [T, hidden].
        weights: the factors of their choices [T, k].
        choices: int64 [T, k], the experts of each token among those of all ranks.
        own: the number of experts of a rank.
        room: the rows that there is memory for, in hundredths of the mean over ranks. None: all that there can be.
    """
    way = _exchanged if by_rows(groups.ep_size, choices.shape[1]) else _gathered
    return way(run, x, weights, choices, own, groups, room)


def of_same_tokens(run: _Run, x: Tensor, weights: Tensor, choices: Tensor, own: int, groups: ParallelGroups) -> Tensor:
    """Return the sum of each token's experts [T, hidden], the same bits on all ranks. All of them have these tokens, so
    none is sent. The arguments are those of `among_ranks`, without a gradient."""
    assert groups.ep_group is not None
    rows = plan_rows(choices - groups.ep_rank * own, own)
    y: Tensor = finish(start_all_reduce(run(x, weights, rows), groups.ep_group))
    return y


def _gathered(
    run: _Run, x: Tensor, weights: Tensor, choices: Tensor, own: int, groups: ParallelGroups, room: int | None
) -> tuple[Tensor, Tensor]:
    group = groups.ep_group
    assert group is not None
    # Choices of other ranks' experts have no row here.
    x, weights = gather_tokens(x, group), gather_tokens(weights, group)
    choices = finish(start_all_gather(choices, group)) - groups.ep_rank * own
    every = choices.numel()
    rows = plan_rows(choices, own, None if room is None else min(every, _share(every, room, groups)))
    return scatter_sums(run(x, weights, rows), group), rows.overflow


def _exchanged(
    run: _Run, x: Tensor, weights: Tensor, choices: Tensor, own: int, groups: ParallelGroups, room: int | None
) -> tuple[Tensor, Tensor]:
    group, (tokens, top), ranks = groups.ep_group, choices.shape, groups.ep_size
    assert group is not None
    most = tokens * min(top, own)
    plan = _places(choices // own, ranks, most if room is None else min(most, _share(tokens * top, room, groups)))

    def sent(x: Tensor, plan: _Places) -> Tensor:
        """Bring rows to the ranks of their choices: [rows, columns] -> [ranks x places, columns]."""
        return exchange(gather(x, plan).unflatten(0, (ranks, -1)), group).flatten(0, 1)

    factors = sent(weights.reshape(-1, 1), plan._replace(slot=plan.slot.view(-1, 1)))
    numbers = (choices % own).flatten()[plan.choice.clamp(min=0)].masked_fill(plan.choice < 0, -1)
    numbers = exchanged(numbers.view(ranks, -1), group).view(-1, 1)
    y = run(sent(x, plan), factors, plan_rows(numbers, own), ranks * tokens)
    y = exchange(y.unflatten(0, (ranks, -1)), group).flatten(0, 1)
    return combine(y, plan), plan.lacking


def _share(rows: int, room: int, groups: ParallelGroups) -> int:
    """Return a rank's part of so many rows, with room."""
    return -(-rows * room // (100 * groups.ep_size))


class _Places(NamedTuple):
    """The places of choices in a tensor that has as many places for each rank."""

    choice: Tensor
    """int32 [ranks x places]: the choice in each place, token * k + its place among the token's. -1: none."""
    slot: Tensor
    """int32 [T, k]: the place of each choice. -1: it has none."""
    lacking: Tensor
    """bool []: whether a choice has no place."""


def _places(to: Tensor, ranks: int, places: int) -> _Places:
    """Give the choices of tokens, which go to these ranks [T, k], places in the order of tokens."""
    rows = plan_rows(to, ranks)
    first = (rows.ends - rows.load).long()
    number = torch.arange(ranks * places, device=to.device)
    rank, place = number // places, number % places
    there = rows.choice[(first[rank] + place).clamp(max=len(rows.choice) - 1)]
    within = rows.slot - first[to]
    slot = torch.where(within < places, to * places + within, -1)
    return _Places(there.masked_fill(place >= rows.load[rank], -1), slot.int(), (rows.load > places).any())
