"""What watches over a run: the signals that stop it, and the watchdog that ends one that hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

HANG_EXIT_CODE = 5
LAUNCHER = "SAGETRAIN_LAUNCHER"
"""Environment variable: the process id of `sagetrain compare`, which started this run."""
_RECORD_SECONDS = 10.0  # for the flight recorder, when a run has hung

T = TypeVar("T")


class StopSignal:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a checkpoint and a clean exit; a second Ctrl-C ends the run at once.

    The first rank says so at once: a launcher that hears of Ctrl-C, too, prints a traceback of its own then.

    Args:
        listens: False in a program that handles its signals itself.
    """

    def __init__(self, listens: bool = True) -> None:
        self.name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if listens else ():
            signal.signal(number, self._ask)

    def ask(self, who: str) -> None:
        """Ask for a checkpoint and a clean end in the name of something else than a signal."""
        self.name = self.name or who

    def _ask(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        if self.name is None and os.environ.get("RANK", "0") == "0":
            said = f"{signal.Signals(number).name}: the run saves a checkpoint and stops"
            if number == signal.SIGINT:
                said += "; a second Ctrl-C ends it at once"
                said += " (a traceback that follows is the launcher's)" * bool(_launchers())
            with suppress(OSError):  # not print, which may be what the signal has interrupted
                os.write(2, f"{chr(10) * sys.stderr.isatty()}{said}\n".encode())
        self.name = self.name or signal.Signals(number).name


class Watchdog:
    """Ends a run that makes no progress, or that has lost its launcher; a thread beside training. Context manager.

    Without a sign of life for `timeout` seconds it writes the stacks of all threads and the collectives that they wait
    in to `folder`/rank-N.txt, beside it what torch's flight recorder knows of the latest collectives, and ends the
    process with HANG_EXIT_CODE. A file there makes the other ranks do the same, so that one look shows who waits for
    whom. Time in which this process was stopped (Ctrl-Z, a suspended job) does not count. If the launcher goes, the
    process sends itself SIGTERM: nobody else would stop it. (One that was gone when this was made is not missed.)

    Args:
        watches: False in a program that goes on after the run: it is never ended.
    """

    def __init__(self, folder: Path, rank: int, timeout: float, watches: bool = True) -> None:
        self._watches = watches
        self._folder, self._path, self._timeout = folder, folder / f"rank-{rank}.txt", timeout
        self._tick = min(max(timeout / 20, 0.1), 5.0)
        self._name = f"rank {rank}"
        self._idle, self._doing, self._old = 0.0, "start", False
        given = os.environ.get(LAUNCHER)  # it may be gone by now
        self._launchers = (int(given),) if given else _launchers()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def forget(self) -> None:
        """Remove the stacks of an earlier run (rank 0 calls it, before any rank enters the context)."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Watchdog:
        self._old = self._folder.exists()  # of an earlier run: a network file system may show it a while longer
        if self._watches:
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
            elif not self._folder.exists():
                self._old = False
            elif not self._old:
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
    dump: Callable[[], bytes] = getattr(c10d, "_dump_nccl_trace_json" if on_gpu else "_dump_fr_trace_json")
    return dump()


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
    """Process ids of what started this rank: torchrun, `sagetrain compare`, or DeepSpeed's launcher and its child here;
    or nothing."""
    if not {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE", LAUNCHER} & os.environ.keys():
        return ()  # started by hand: training goes on when the shell closes
    parent = os.getppid()
    if LAUNCHER in os.environ:
        return (parent,)
    try:
        above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        # Both: any shell above another launcher may have the word in its command line.
        names = [Path(f"/proc/{each}/cmdline").read_bytes() for each in (parent, above)]
    except OSError:  # the parent is going right now
        return (parent,)
    return (parent, above) if b"deepspeed.launcher.launch" in names[0] and b"deepspeed" in names[1] else (parent,)
