"""The order of a pipeline's work can be played by any number of stages, and idles no more than 1F1B has to."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from sagetrain.parallel.orders import Action, in_flight, orders

LAYOUTS = [(ranks, per_rank) for ranks, per_rank in product(range(2, 9), (1, 2)) if ranks * per_rank <= 12] + [(3, 3)]


def played(order: list[list[Action]], ranks: int, per_rank: int, backward: float = 2.0) -> float:
    """Play an order with messages that take no time, and return when the last stage is done. A forward pass of a chunk
    takes 1. An action starts when its stage is free and its input has arrived."""
    last, done, ends, begun = ranks * per_rank - 1, dict[Action, float](), [0.0] * ranks, [0] * ranks
    while any(begun[rank] < len(order[rank]) for rank in range(ranks)):
        before = sum(begun)
        for rank in range(ranks):
            while begun[rank] < len(order[rank]):
                action = order[rank][begun[rank]]
                kind, chunk, micro = action
                if kind == "forward":
                    needs = [Action("forward", chunk - 1, micro)] if chunk else []
                else:
                    needs = [Action("forward", chunk, micro)]
                    needs += [Action("backward", chunk + 1, micro)] if chunk < last else []
                if any(need not in done for need in needs):
                    break
                start = max([ends[rank], *(done[need] for need in needs)])
                done[action] = ends[rank] = start + (1.0 if kind == "forward" else backward)
                begun[rank] += 1
        assert sum(begun) > before, "all stages wait for each other"
    return max(ends)


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_every_order_can_be_played(ranks: int, per_rank: int) -> None:
    for micros in range(1, 65):
        order = orders(ranks, per_rank, micros)
        for rank, own in enumerate(order):
            assert len(own) == len(set(own)) == 2 * micros * per_rank
            assert {action.chunk % ranks for action in own} == {rank}
        time = played(order, ranks, per_rank)
        work = 3.0 * micros * per_rank
        # A pipeline fills and drains in the time of one chunk on each other stage, forward and backward.
        if per_rank == 1 or micros % ranks == 0:
            assert time == work + 3.0 * (ranks - 1)
        assert played(orders(ranks, per_rank, micros, backward=False), ranks, per_rank) >= micros * per_rank


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_few_micro_batches_are_kept_at_once(ranks: int, per_rank: int) -> None:
    for micros in range(1, 65):
        kept = [in_flight(order) for order in orders(ranks, per_rank, micros)]
        if per_rank == 1:
            assert kept == [min(micros, ranks - rank) for rank in range(ranks)]
        else:
            largest = micros if micros < ranks else -(-micros // (micros // ranks))
            bound = (per_rank - 1) * largest + 1
            assert kept == [min(micros * per_rank, 2 * (ranks - rank - 1) + bound) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_messages_arrive_in_the_order_in_which_they_are_awaited(ranks: int, per_rank: int) -> None:
    last = ranks * per_rank - 1
    for micros in range(1, 65):
        sent, awaited = defaultdict(list), defaultdict(list)
        for rank, own in enumerate(orders(ranks, per_rank, micros)):
            for kind, chunk, micro in own:
                step = 1 if kind == "forward" else -1
                if 0 <= chunk + step <= last:
                    wraps = min(chunk, chunk + step) % ranks == ranks - 1
                    sent[rank, (rank + step) % ranks, kind, wraps].append((chunk + step, micro))
                if 0 <= chunk - step <= last:
                    wraps = min(chunk, chunk - step) % ranks == ranks - 1
                    awaited[(rank - step) % ranks, rank, kind, wraps].append((chunk, micro))
        assert sent == awaited
