"""The guards of a run: the signals that stop it with a checkpoint, and the watchdog that ends it when it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from sagetrain.cluster.launcher import ASKING
from sagetrain.config.errors import ConfigError, some

HANG_EXIT_CODE = 5
LAUNCHER = "SAGETRAIN_LAUNCHER"
"""The environment variable with the process id of the `sagetrain compare`, or of the keeper (keeper.py), that started
this process."""
# The flight recorder gets this much time when a run has hung.
_RECORD_SECONDS = 10.0

T = TypeVar("T")


_TRAINING = threading.Lock()
"""This is held while a run trains in this process."""


@contextmanager
def alone(own_process: bool) -> Iterator[None]:
    """Be the only run of this process, whose process group, environment variables and signals it uses. Raises
    ConfigError if another run trains, or, with `own_process`, this thread cannot catch signals."""
    if own_process and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "own_process=True catches signals, which Python allows in the main thread alone: call train there, or "
            "leave own_process out and let the program save by a callback (RunStart.stop)"
        )
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "another call of train is under way in this process, in a thread or around a callback, and a process "
            "trains one run at a time: call train again when that has returned, or in a process of its own"
        )
    try:
        yield
    finally:
        _TRAINING.release()


class StopSignal:
    """Turn SIGTERM, SIGUSR1 and Ctrl-C into a request for a checkpoint and a clean exit. A second Ctrl-C ends the run
    at once. A program that handles its signals itself sets `listens` to False.

    Rank 0 prints the answer to a signal immediately. A launcher that gets the same Ctrl-C prints a traceback of its own
    a moment later.
    """

    def __init__(self, listens: bool = True) -> None:
        self.name: str | None = None
        for number in ASKING if listens else ():
            signal.signal(number, self._ask)

    def ask(self, who: str) -> None:
        """Request a checkpoint and a clean exit without a signal. `who` names the cause in the messages."""
        self.name = self.name or who

    def _ask(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        if self.name is None and os.environ.get("RANK", "0") == "0":
            said = f"{signal.Signals(number).name}: the run saves a checkpoint and stops"
            if number == signal.SIGINT:
                said += "; a second Ctrl-C ends it at once"
                said += " (a traceback that follows is the launcher's)" * bool(launchers())
            # print() is not reentrant, and the signal may have interrupted a print().
            with suppress(OSError):
                os.write(2, f"{chr(10) * sys.stderr.isatty()}{said}\n".encode())
        self.name = self.name or signal.Signals(number).name


class Watchdog:
    """End a run that makes no progress or has lost its launcher. The watchdog is a context manager that runs a thread
    beside training.

    If there is no sign of life for `timeout` seconds, the watchdog writes `folder`/rank-N.txt with the stacks of all
    threads and the collectives that they wait in. It writes the latest collectives of torch's flight recorder to a
    second file, and ends the process with HANG_EXIT_CODE. The other ranks see the file and do the same, so the files of
    all ranks together show who waits for whom. Time in which this process was stopped (Ctrl-Z, a suspended job) does
    not count.

    If the launcher ends, nobody else would stop this process, so the process sends itself SIGTERM. A launcher that had
    already ended when the watchdog was made is ignored.

    Args:
        ranks: the number of ranks of the run. If some of them write no stacks, the first one that does names them.
        watches: False in a program that continues after the run. Such a process is never ended.
    """

    def __init__(self, folder: Path, rank: int, timeout: float, ranks: int = 1, watches: bool = True) -> None:
        self.watches: bool = watches
        """This is true if the process belongs to the run and ends with it, and false if a program continues."""
        self._ranks = ranks
        self._folder, self._path, self._timeout = folder, folder / f"rank-{rank}.txt", timeout
        self._tick = min(max(timeout / 20, 0.1), 5.0)
        self._name = f"rank {rank}"
        self._idle, self._doing, self._old = 0.0, "start", False
        self.waits: Callable[[], str] = lambda: ""
        """A function that says in words what this rank waits for, or returns "". It is called when the run has hung."""
        # The launcher may have ended by now.
        self._launchers = told_launchers()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def forget(self) -> None:
        """Remove the stacks of an earlier run. Rank 0 calls this before any rank enters the context."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Watchdog:
        # A network file system may show the folder of an earlier run for a while after it was removed.
        self._old = self._folder.exists()
        if self.watches:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def begin(self, doing: str) -> None:
        """Record a sign of life, and the activity that begins now."""
        self._idle, self._doing = 0.0, doing

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items and record a sign of life at each."""
        for item in items:
            self._idle = 0.0
            yield item

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            self._idle += self._tick
            if self._idle > self._timeout:
                self._end(f"no progress for {self._timeout / 60:g} minutes (training.timeout_minutes)")
            elif not self._folder.exists():
                self._old = False
            elif not self._old:
                self._end("another rank hangs")
            if self._launchers and launchers() != self._launchers:
                self._launchers = ()
                _tell(f"{self._name}: the launcher is gone; saving and stopping")
                os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, why: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("w") as file:
                doing = self._in_words()
                file.write(f"{self._name}, in {doing}: {why}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                # This ends the process even if the flight recorder blocks and holds the GIL.
                faulthandler.dump_traceback_later(3 * _RECORD_SECONDS, exit=True, file=file)
                waits = self._record_collectives()
                file.write(f"\n{waits}\n")
                file.flush()
                _tell(f"{self._name}: error: in {doing}: {why}; {waits}; stacks in {self._path}")
                # The launcher ends all ranks when the first one exits, so this rank gives the others time to write
                # their files.
                self._over.wait(3 * self._tick)
                if silent := self._silent():
                    _tell(silent)
                    file.write(f"{silent}\n")
        finally:
            os._exit(HANG_EXIT_CODE)

    def _silent(self) -> str:
        """Name the ranks that wrote no stacks, on the first rank that did; "" if there are none. A rank that merely
        waits in a collective does write, because its watchdog has a thread of its own."""
        missing = [rank for rank in range(self._ranks) if not (self._folder / f"rank-{rank}.txt").exists()]
        first = next((rank for rank in range(self._ranks) if rank not in missing), None)
        if not missing or self._name != f"rank {first}":
            return ""
        return (
            f"error: no stacks of rank {some(missing, 8)}: a process that writes none is stopped or gone, or cannot "
            "write there; look at its host first"
        )

    def _in_words(self) -> str:
        """Return what this rank does, and what it waits for if that is known."""
        try:
            waits = self.waits()
        # The process has to end, whatever is wrong with it.
        except Exception as error:  # noqa: BLE001
            waits = f"what this rank waits for is not known ({error})"
        return f"{self._doing}, where {waits}" if waits else self._doing

    def _record_collectives(self) -> str:
        """Write the content of the flight recorder to a file and return a sentence about the collectives under way.
        This takes at most _RECORD_SECONDS."""
        said = [f"the flight recorder gave nothing in {_RECORD_SECONDS} seconds"]

        def record() -> None:
            try:
                recorded = flight_record()
                self._path.with_suffix(".collectives.json").write_bytes(recorded)
                said[0] = collectives_under_way(recorded)
            # The process has to end, whatever the recorder raises.
            except Exception as error:  # noqa: BLE001
                said[0] = f"the flight recorder failed: {error}"

        thread = threading.Thread(target=record, name="flight recorder", daemon=True)
        thread.start()
        thread.join(_RECORD_SECONDS)
        return said[0]


def flight_record() -> bytes:
    """Return the latest collectives of this process as the JSON of torch's flight recorder. The recorder is on unless
    TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE) is 0."""
    from torch._C import _distributed_c10d as c10d

    # In torch 2.8 to 2.13, builds with CUDA have a recorder for NCCL. The other recorder covers gloo.
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    dump: Callable[[], bytes] = getattr(c10d, "_dump_nccl_trace_json" if on_gpu else "_dump_fr_trace_json")
    return dump()


def collectives_under_way(record: bytes) -> str:
    """Say which collective is the oldest unfinished one of each process group."""
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
    """Print a line on stderr. On a terminal the line does not continue the progress bar."""
    print("\n" * sys.stderr.isatty() + text, file=sys.stderr, flush=True)


def told_launchers() -> tuple[int, ...]:
    """Return the process ids of the launchers of this rank, as the environment names them. One that is named may have
    ended, so that `launchers` returns others."""
    given = os.environ.get(LAUNCHER)
    return (int(given),) if given else launchers()


def launchers() -> tuple[int, ...]:
    """Return the process ids of the launchers of this rank: torchrun, `sagetrain compare`, a keeper, or DeepSpeed's
    launcher and its child on this host. The tuple is empty if no launcher started this rank."""
    if not {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE", LAUNCHER} & os.environ.keys():
        # A run that was started by hand continues when its shell closes.
        return ()
    parent = os.getppid()
    if LAUNCHER in os.environ:
        return (parent,)
    try:
        above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        # Both names are compared, because the command line of a shell above another launcher may contain the word, too.
        names = [Path(f"/proc/{each}/cmdline").read_bytes() for each in (parent, above)]
    # The parent is exiting at this moment.
    except OSError:
        return (parent,)
    return (parent, above) if b"deepspeed.launcher.launch" in names[0] and b"deepspeed" in names[1] else (parent,)
