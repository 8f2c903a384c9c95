"""The position of a run: its steps, its tokens, and the ledger of the samples that it has consumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sagetrain.config.errors import CheckpointError, TrainingError
from sagetrain.storage.url_path import Location

# With 31 bits the sum over a million ranks is exact in the float64 that carries it.
_FOLD_BITS = 31


def fold(sample_ids: Iterable[int], dp_rank: int | np.ndarray) -> int:
    """Return a number below 2**31 for a set of pairs (sample, data-parallel rank that trained on it). The order of the
    samples does not matter.

    Folds can be added: the sum of all ranks' folds, modulo 2**31, is the fold of the whole step.
    """
    x = np.asarray(sample_ids, dtype=np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.asarray(dp_rank).astype(np.uint64)
    # These are the constants of the finalizer of splitmix64.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return int((x >> np.uint64(64 - _FOLD_BITS)).sum()) % (1 << _FOLD_BITS)


def expected_fold(first: int, count: int, micro_batch_size: int, dp_size: int) -> int:
    """Return the fold of a step over samples first .. first + count - 1, which are dealt to the ranks in turn by
    micro-batches."""
    position = np.arange(count)
    return fold(first + position, position // micro_batch_size % dp_size)


@dataclass(frozen=True)
class EndedPart:
    """A part of a run that has ended (config/run_parts.py), whose sequences had a length of their own."""

    steps: int
    """The steps of the run up to its end."""
    seq_length: int
    order: str
    """The fingerprint of the order of its samples."""


@dataclass
class Ledger:
    """The ledger of the samples that a run has consumed: a chain of SHA-256 over its steps.

    `head` begins as the fingerprint of the order of samples. Each step hashes `head` together with its first sample and
    its number of samples.

    `segments` are the runs of equal steps, [first sample, samples per step, steps]. The chain can be computed again
    from them.

    `dropped` holds the numbers of the steps, from 1, whose samples were passed over without an update. Either the user
    asked for it (training.drop_steps), or a policy did (stability.spikes), or the update was given up when the run went
    back to an earlier checkpoint.

    `ended` has the parts of the run before this one. Samples are counted in sequences of the present part: behind a
    border, the first sample is the number of tokens seen divided by the new length.
    """

    head: str = ""
    segments: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    ended: list[EndedPart] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps so far, dropped ones included."""
        return sum(times for _, _, times in self.segments)

    @property
    def samples(self) -> int:
        """The number of samples so far, in sequences of the last segment's length."""
        if self.ended:
            first, count, times = self.segments[-1]
            return first + count * times
        return sum(count * times for _, count, times in self.segments)

    def samples_of_steps(self) -> list[int]:
        """Return the number of samples of each step."""
        return [count for _, count, times in self.segments for _ in range(times)]

    def last_tokens(self, seq_length: int) -> int:
        """Return the tokens of the last step; 0 if there was none. `seq_length` is that of the present part."""
        if self.ended and self.ended[-1].steps == self.steps:
            seq_length = self.ended[-1].seq_length
        return self.segments[-1][1] * seq_length if self.segments else 0

    def begin_part(self, ended: EndedPart, order: str, seq_length: int) -> None:
        """End the present part. The next one has samples of another length, in another order."""
        self.head = hashlib.sha256(f"{self.head} {order} {seq_length}".encode()).hexdigest()
        self.ended.append(ended)

    def add(self, first: int, count: int, dropped: bool = False) -> None:
        """Add one step over samples first .. first + count - 1."""
        entry = f"{self.head} {first} {count}{' dropped' if dropped else ''}"
        self.head = hashlib.sha256(entry.encode()).hexdigest()
        last = self.segments[-1] if self.segments else [0, 0, 0]
        if last[1] == count and last[0] + count * last[2] == first:
            last[2] += 1
        else:
            self.segments.append([first, count, 1])
        if dropped:
            self.dropped.append(self.steps)

    @classmethod
    def verified(cls, stored: Ledger | None, order: str, where: Location, seq_length: int = 0) -> Ledger:
        """Check the ledger of a checkpoint and return it. Raises CheckpointError if samples were skipped or seen twice,
        or the chain does not follow from its segments. RunState.from_json has compared its numbers with the training
        state's.

        Args:
            order: the fingerprint of the order of samples.
            where: the folder of the checkpoint, for messages.
            seq_length: the length of a sequence of the part that wrote it, where the run has parts.
        """
        what, way_out = f"{where}: its ledger of consumed samples", "restore another checkpoint of this run"
        if not (stored and stored.head):
            raise CheckpointError(f"{what} is missing; {way_out}, or choose another training.run_dir")
        orders = [*((part.seq_length, part.order) for part in stored.ended), (seq_length, order)]
        again, steps, samples, dropped = cls(orders[0][1]), 0, 0, set(stored.dropped)
        for first, count, times in stored.segments:
            number = len(again.ended)
            if number < len(stored.ended) and (part := stored.ended[number]).steps == steps:
                length, following = orders[number + 1]
                samples = samples * part.seq_length // length
                again.begin_part(part, following, length)
            if first != samples:
                kind = "skips samples" if first > samples else "has seen twice samples"
                low, high = sorted((first, samples))
                raise CheckpointError(f"{what} {kind} {low:,} to {high - 1:,}; {way_out}")
            for _ in range(times):
                steps += 1
                again.add(samples, count, dropped=steps in dropped)
                samples += count
        if again.head != stored.head:
            raise CheckpointError(
                f"{what} ends in {stored.head[:12]}, its steps give {again.head[:12]}: it was changed, or another "
                f"order of samples was trained on; {way_out}"
            )
        return again


def check_consumed(folds: int, first: int, count: int, micro_batch_size: int, dp_size: int, world_size: int) -> None:
    """Check that `folds`, summed over all ranks, is the fold of samples first .. first + count - 1, each seen once. All
    ranks of a tensor- and context-parallel group report the samples that they share. Raises TrainingError if the ranks
    trained on other samples."""
    expected = world_size // dp_size * expected_fold(first, count, micro_batch_size, dp_size)
    if (folds - expected) % (1 << _FOLD_BITS):
        raise TrainingError(
            f"the ranks have not trained on samples {first:,} to {first + count - 1:,}, each once: some rank reads "
            "other data, or stands elsewhere in it. Nothing of this step was saved"
        )


@dataclass
class TrainState:
    """The position of a run. Everything else follows from the configuration.

    `controllers` is what each stability controller remembers, by the controller's name.
    """

    step: int = 0
    tokens: int = 0
    sequences: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    controllers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def advance(self, tokens: int, seq_length: int, dropped: bool = False) -> None:
        """Count one step. A dropped step only moves on in the data."""
        self.ledger.add(self.sequences, tokens // seq_length, dropped)
        self.step += 1
        self.tokens += tokens
        self.sequences += tokens // seq_length
