"""What watches over a run: the ledger of the samples it has consumed, and the watchdog that ends a run that hangs."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sagetrain.train.checkpoint import CheckpointError

HANG_EXIT_CODE = 5
_FOLD_BITS = 31  # so that the sum over a million ranks is exact in the float64 that carries it

T = TypeVar("T")


class TrainingError(RuntimeError):
    """Training cannot go on (non-finite loss, say); the newest checkpoint is untouched."""


# -- the ledger ----------------------------------------------------------------------------------------------------


def fold(sample_ids: Iterable[int], dp_rank: int | np.ndarray) -> int:
    """A number below 2**31 for the set of (sample, data-parallel rank that trained on it), whatever its order.

    It adds up: the folds of all ranks sum, modulo 2**31, to the fold of the whole step.
    """
    x = np.asarray(sample_ids, dtype=np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.asarray(dp_rank).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of splitmix64
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return int((x >> np.uint64(64 - _FOLD_BITS)).sum()) % (1 << _FOLD_BITS)


def expected_fold(first: int, count: int, micro_batch_size: int, dp_size: int) -> int:
    """The fold of a step over samples first .. first + count - 1, dealt to the ranks in turn by micro-batches."""
    position = np.arange(count)
    return fold(first + position, position // micro_batch_size % dp_size)


@dataclass
class Ledger:
    """Which samples a run has consumed: a chain of SHA-256 over its optimizer steps.

    `head` begins as the fingerprint of the order of samples; each step hashes it with its first sample and their count.
    `segments` are the runs of equal steps, [first sample, samples per step, steps], from which it is found again.
    """

    head: str = ""
    segments: list[list[int]] = field(default_factory=list)

    def add(self, first: int, count: int) -> None:
        """Enter one optimizer step over samples first .. first + count - 1."""
        self.head = hashlib.sha256(f"{self.head} {first} {count}".encode()).hexdigest()
        if self.segments and self.segments[-1][1] == count:
            self.segments[-1][2] += 1
        else:
            self.segments.append([first, count, 1])

    @classmethod
    def verified(cls, stored: dict[str, Any] | None, order: str, step: int, sequences: int, where: Path) -> Ledger:
        """The ledger of a checkpoint at `step` after `sequences` samples, in the order with fingerprint `order`.

        CheckpointError if samples were skipped or seen twice, if its steps or samples are not those of the training
        state, or if the chain is not the one that its segments give.
        """
        what, way_out = f"{where}: its ledger of consumed samples", "restore another checkpoint of this run"
        if not stored:
            raise CheckpointError(f"{what} is missing; {way_out}, or choose another training.run_dir")
        again, steps, samples = cls(order), 0, 0
        for first, count, times in stored["segments"]:
            if first != samples:
                kind = "skips samples" if first > samples else "has seen twice samples"
                low, high = sorted((first, samples))
                raise CheckpointError(f"{what} {kind} {low:,} to {high - 1:,}; {way_out}")
            for _ in range(times):
                again.add(samples, count)
                samples += count
            steps += times
        if (steps, samples) != (step, sequences):
            raise CheckpointError(
                f"{what} has {steps:,} steps over {samples:,} samples, the training state says {step:,} steps over "
                f"{sequences:,}; {way_out}"
            )
        if again.head != stored["head"]:
            raise CheckpointError(
                f"{what} ends in {stored['head'][:12]}, its steps give {again.head[:12]}: it was changed, or another "
                f"order of samples was trained on; {way_out}"
            )
        return again


def check_consumed(folds: int, first: int, count: int, micro_batch_size: int, dp_size: int, tp_size: int) -> None:
    """TrainingError unless `folds`, the sum over all ranks, is that of samples first .. first + count - 1, each once."""
    expected = tp_size * expected_fold(first, count, micro_batch_size, dp_size)
    if (folds - expected) % (1 << _FOLD_BITS):
        raise TrainingError(
            f"the ranks have not trained on samples {first:,} to {first + count - 1:,}, each once: some rank reads "
            "other data, or stands elsewhere in it. Nothing of this step was saved; run again to continue from the "
            "newest checkpoint"
        )
