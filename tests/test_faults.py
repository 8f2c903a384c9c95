"""Faults, with real processes: whatever is killed, stopped, filled up or damaged, a run ends with a word about it, or
continues to bitwise the same weights with no sample skipped or seen twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagetrain.train.checkpoint import CheckpointError
from sagetrain.train.guard import Ledger, TrainingError, check_consumed, fold

# -- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batch", "dp_size", "tp_size"), [(1, 1, 1), (2, 2, 1), (4, 3, 2)])
def test_every_sample_once_on_the_rank_it_was_dealt_to(micro_batch, dp_size, tp_size) -> None:
    first, count = 3 * 2**40, 5 * micro_batch * dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for micro_step in range(0, count, micro_batch):
        ranks[micro_step // micro_batch % dp_size] += range(first + micro_step, first + micro_step + micro_batch)
    layout = (micro_batch, dp_size, tp_size)

    def folds() -> int:
        return tp_size * sum(fold(ids, rank) for rank, ids in enumerate(ranks))

    check_consumed(folds(), first, count, *layout)
    for wrong_first, wrong_count in ((first + 1, count), (first, count + 1), (first - count, count)):
        with pytest.raises(TrainingError, match="each once"):
            check_consumed(folds(), wrong_first, wrong_count, *layout)
    once = ranks[0]
    for ranks[0] in (once[1:], [*once, once[0]], [once[-1] + 1, *once[1:]]):  # skipped, seen twice, another's
        with pytest.raises(TrainingError, match=f"samples {first:,} to {first + count - 1:,}"):
            check_consumed(folds(), first, count, *layout)


def test_ranks_with_each_others_samples_are_noticed() -> None:
    """The set is right, but a tensor-parallel rank that swaps data with its neighbour computes nonsense."""
    right = 2 * (fold([0, 1], 0) + fold([2, 3], 1))
    check_consumed(right, 0, 4, 2, 2, 2)
    with pytest.raises(TrainingError):
        check_consumed(right - fold([0, 1], 0) + fold([2, 3], 0) - fold([2, 3], 1) + fold([0, 1], 1), 0, 4, 2, 2, 2)


def ledger_of(sizes: list[int]) -> dict:
    ledger, cursor = Ledger("order"), 0
    for size in sizes:
        ledger.add(cursor, size)
        cursor += size
    return {"head": ledger.head, "segments": ledger.segments}


def test_ledger_is_found_again_from_its_segments() -> None:
    sizes = [8] * 5 + [16] * 3 + [8]
    stored = ledger_of(sizes)
    assert stored["segments"] == [[0, 8, 5], [40, 16, 3], [88, 8, 1]]
    again = Ledger.verified(stored, "order", 9, 96, Path("step-9"))
    assert (again.head, again.segments) == (stored["head"], stored["segments"])
    again.add(96, 8)
    assert again.head == ledger_of([*sizes, 8])["head"] != ledger_of([*sizes, 9])["head"]


@pytest.mark.parametrize(
    ("segments", "step", "words"),
    [
        ([[0, 8, 5], [48, 16, 3]], 8, "skips samples 40 to 47"),
        ([[0, 8, 5], [32, 16, 3]], 8, "has seen twice samples 32 to 39"),
        ([[0, 8, 5], [40, 16, 2]], 8, "7 steps over 72 samples, the training state says 8 steps over 88"),
        ([[0, 16, 3], [48, 8, 5]], 8, "its steps give"),  # as many samples, in other steps
        (None, 8, "is missing"),
    ],
)
def test_a_ledger_that_does_not_fit_is_refused(segments, step, words) -> None:
    stored = segments and {**ledger_of([8] * 5 + [16] * 3), "segments": segments}
    with pytest.raises(CheckpointError, match=words):
        Ledger.verified(stored, "order", step, 88, Path("step-00000008"))
    with pytest.raises(CheckpointError, match="order of samples"):
        Ledger.verified(ledger_of([8]), "another order", 1, 8, Path("step-00000001"))
