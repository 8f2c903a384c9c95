"""What watches over a run: the ledger of the samples it has consumed, and the watchdog that ends a run that hangs."""

from __future__ import annotations

import faulthandler
import hashlib
import json
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
import torch.distributed as dist

from sagetrain.train.checkpoint import CheckpointError

HANG_EXIT_CODE = 5
_RECORD_SECONDS = 10.0  # for the flight recorder, when a run has hung
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


def check_consumed(folds: int, first: int, count: int, micro_batch_size: int, dp_size: int, world_size: int) -> None:
    """TrainingError unless `folds`, summed over all ranks, is that of samples first .. first + count - 1, each once.

    All ranks of a tensor- and context-parallel group report the samples they share.
    """
    expected = world_size // dp_size * expected_fold(first, count, micro_batch_size, dp_size)
    if (folds - expected) % (1 << _FOLD_BITS):
        raise TrainingError(
            f"the ranks have not trained on samples {first:,} to {first + count - 1:,}, each once: some rank reads "
            "other data, or stands elsewhere in it. Nothing of this step was saved; run again to continue from the "
            "newest checkpoint"
        )


# -- the watchdog --------------------------------------------------------------------------------------------------


class Watchdog:
    """Ends a run that makes no progress, or that has lost its launcher; a thread beside training. Context manager.

    Without a sign of life for `timeout` seconds it writes the stacks of all threads and the collectives that they wait
    in to `folder`/rank-N.txt, beside it what torch's flight recorder knows of the latest collectives, and ends the
    process with HANG_EXIT_CODE. A file there makes the other ranks do the same, so that one look shows who waits for
    whom. Time in which this process was stopped (Ctrl-Z, a suspended job) does not count. If the launcher is gone, the
    process sends itself SIGTERM: nobody else would stop it.
    """

    def __init__(self, folder: Path, rank: int, timeout: float):
        self._folder, self._path, self._timeout = folder, folder / f"rank-{rank}.txt", timeout
        self._tick = min(max(timeout / 20, 0.1), 5.0)
        self._name = f"rank {rank}"
        self._idle, self._doing, self._launchers = 0.0, "start", _launchers()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def forget(self) -> None:
        """Remove the stacks of an earlier run (rank 0 calls it, before any rank enters the context)."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def begin(self, doing: str) -> None:
        """A sign of life, and what comes now."""
        self._idle, self._doing = 0.0, doing

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of them a sign of life."""
        for item in items:
            self._idle = 0.0
            yield item

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            self._idle += self._tick
            if self._idle > self._timeout:
                self._end(f"no progress for {self._timeout / 60:g} minutes (training.timeout_minutes)")
            elif self._folder.exists():
                self._end("another rank hangs")
            if self._launchers and _launchers() != self._launchers:
                self._launchers = ()
                _tell(f"{self._name}: the launcher is gone; saving and stopping")
                os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, why: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("w") as file:
                file.write(f"{self._name}, in {self._doing}: {why}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                # Ends the process even if the recorder blocks and lets no other Python run.
                faulthandler.dump_traceback_later(3 * _RECORD_SECONDS, exit=True, file=file)
                waits = self._record_collectives()
                file.write(f"\n{waits}\n")
                file.flush()
                _tell(f"{self._name}: error: in {self._doing}: {why}; {waits}; stacks in {self._path}")
                self._over.wait(3 * self._tick)  # the launcher ends all after the first one: let them write first
        finally:
            os._exit(HANG_EXIT_CODE)

    def _record_collectives(self) -> str:
        """Write what the flight recorder has, and say which collectives are under way; in bounded time."""
        said = [f"the flight recorder gave nothing in {_RECORD_SECONDS} seconds"]

        def record() -> None:
            try:
                recorded = flight_record()
                self._path.with_suffix(".collectives.json").write_bytes(recorded)
                said[0] = collectives_under_way(recorded)
            except Exception as error:  # noqa: BLE001 - whatever it is, the process has to end
                said[0] = f"the flight recorder failed: {error}"

        thread = threading.Thread(target=record, name="flight recorder", daemon=True)
        thread.start()
        thread.join(_RECORD_SECONDS)
        return said[0]


def flight_record() -> bytes:
    """The latest collectives of this process, as the JSON of torch's flight recorder, which is on unless
    TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE) is 0."""
    from torch._C import _distributed_c10d as c10d

    # NCCL has a recorder of its own, in builds with CUDA; the other has gloo's. (torch 2.8 to 2.13)
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    return (c10d._dump_nccl_trace_json if on_gpu else c10d._dump_fr_trace_json)()


def collectives_under_way(record: bytes) -> str:
    """The oldest collective of every process group that is not finished, in words."""
    waiting: dict[str, str] = {}
    for entry in json.loads(record).get("entries", []):
        name, description = entry["process_group"]
        if not (entry["retired"] or entry["state"] == "completed" or name in waiting):
            shapes = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"],
                                                                          strict=False))  # fmt: skip
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            waiting[name] = f"{entry['profiling_name']} number {number} of group {name} ({description}) over {shapes}"
    return f"waits in {'; '.join(waiting.values())}" if waiting else "no collective is under way"


def _tell(text: str) -> None:
    """On stderr, not behind a terminal's progress bar."""
    print("\n" * sys.stderr.isatty() + text, file=sys.stderr, flush=True)


def _launchers() -> tuple[int, ...]:
    """Process ids of what started this rank: torchrun, or DeepSpeed's launcher and its child here; or nothing."""
    if not {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE"} & os.environ.keys():
        return ()  # started by hand: training goes on when the shell closes
    parent = os.getppid()
    try:
        above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        deepspeed = b"deepspeed" in Path(f"/proc/{above}/cmdline").read_bytes()
    except OSError:  # the parent is going right now
        return (parent,)
    return (parent, above) if deepspeed else (parent,)
