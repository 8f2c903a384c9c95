"""The keeper of a rank: the process that a launcher starts, where training.restarts is above 0.

A keeper imports everything but DeepSpeed once and forks its rank. It has no GPU, no process group and no threads, so
the fork is as fresh as a new process, without the seconds of the imports. When a rank of the run dies, every keeper
ends its own rank with SIGKILL, which also frees a rank that waits inside of NCCL, and forks a new one. The new ranks
continue from the newest checkpoint.

The keepers agree (agreement.py) through a store that outlives ranks. No keeper forks the next generation before all
have said that their rank is gone, so two generations never write at the same time.

The world of the keepers has a fixed size. A host that is lost, or on which ranks die again and again, ends it. Where
torchrun is elastic it then begins another world, of keepers on the hosts that are left and on spare ones. The deaths so
far are in a file of the run folder meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from sagetrain.cluster.agreement import (
    MISSED_BEATS,
    SILENT_BEATS,
    TICK,
    Agreement,
    host_to_leave,
    suspects,
    why_it_ends,
)
from sagetrain.cluster.guard import LAUNCHER, launchers, told_launchers
from sagetrain.cluster.launcher import ASKING, elastic, elastic_in_vain
from sagetrain.cluster.lifeline import KEEPER, Death, Lifeline, die_with_parent, lifeline, read_words
from sagetrain.cluster.rendezvous import keepers_store
from sagetrain.config.errors import TRAINING_EXIT_CODE, ConfigError, many

_GRACE = 1.0
"""The seconds that a keeper waits with its report of an error. A rank may fail because another one has died, whose
keeper says so at once."""
_LATE_MODULES = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
"""Modules that a run imports while it starts. DeepSpeed is not one: where there is a GPU its import starts a thread of
the driver, and takes each rank less than a second."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_DEATHS = ".deaths.json"
"""The file of the run folder with the deaths before torchrun began another world, and the processes of torchrun that it
had then."""
_NEVER_AGAIN = (2, 3, TRAINING_EXIT_CODE)
"""The exit codes (cli/exits.py) of mistakes, of disks, and of training that cannot go on."""


def keep(restarts: int, minutes: float, run_dir: Path, say: Callable[[str], None]) -> None:
    """Become the keeper of this rank. Return in every process that is to train, and never in the keeper. Raises
    ConfigError if this system has no keepers, or the store cannot be reached.

    Args:
        minutes: the time that keepers wait for the first one.
    """
    if lifeline():
        return
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"training.restarts {restarts} needs Linux, and this is {sys.platform}: set it to 0")
    if os.environ.get("RANK") == "0" and (said := elastic_in_vain()):
        say(said)
    Keeper(restarts, keepers_store(minutes), can_fork(_LATE_MODULES), run_dir, say).run()


def can_fork(modules: Sequence[str]) -> bool:
    """Import what the ranks will need, and return whether they can be forks of this process."""
    # torch.cuda.is_available would initialize CUDA otherwise, and a fork could not use it.
    asked = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    for name in modules:
        import_module(name)
    os.environ.pop(_NVML)
    if asked is not None:
        os.environ[_NVML] = asked
    if _threads() > 1:
        # OpenBLAS begins with threads and ends them before a fork. Products of numpy would begin them again, but a
        # keeper makes none.
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
    return _threads() == 1 and not _has_cuda()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_cuda() -> bool:
    """Whether CUDA is initialized in this process. The driver is asked, because libraries may go past torch."""
    not_initialized = 3
    with suppress(OSError):
        # This does not load the library. If nobody else has, nothing is initialized.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized)
    return False


class KeptRank:
    """A process that trains, as its keeper sees it."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe, self._open, self._heard, self._closed = pid, pipe, True, b"", False
        self.step, self.why, self.memory = 0, "", False
        self.code: int | None = None
        """The exit code; None: the process runs; negative: the number of the signal that killed it."""
        self.ended = 0.0

    def look(self, seconds: float) -> None:
        """Listen to the process for up to so many seconds, and note whether it has ended."""
        if not self._open:
            time.sleep(seconds)
        elif select.select([self._pipe], [], [], seconds)[0]:
            self._hear()
        self._reap(os.WNOHANG)

    def kill(self) -> None:
        """End the process, and wait until it is gone."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        if not self._closed:
            self._closed = True
            os.close(self._pipe)

    def _reap(self, how: int) -> None:
        if self.code is None and (found := os.waitpid(self.pid, how))[0]:
            while self._open and select.select([self._pipe], [], [], 0)[0]:
                self._hear()
            self.code, self.ended = os.waitstatus_to_exitcode(found[1]), time.time()

    def _hear(self) -> None:
        heard = os.read(self._pipe, 1 << 16)
        self._open = bool(heard)
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            words = read_words(line)
            self.step = words.get("step", self.step)
            self.why, self.memory = words.get("why", self.why), words.get("memory", self.memory)


class Keeper:
    """The keeper of one rank.

    Args:
        forks: whether ranks are forks of this process. Otherwise each is a new interpreter, which imports again.
    """

    def __init__(self, restarts: int, store: Store, forks: bool, run_dir: Path, say: Callable[[str], None]) -> None:
        self._restarts, self._forks, self._agreement = restarts, forks, Agreement(store)
        self._elastic, self._path, self._known = elastic(), run_dir / _DEATHS, list[str]()
        self._hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._patience = MISSED_BEATS if self._elastic else SILENT_BEATS
        self._say = say if self._agreement.rank == 0 else lambda text: None
        self._launchers, self._asked = told_launchers(), 0
        self._rank: KeptRank | None = None
        self._handlers = {number: signal.getsignal(number) for number in ASKING}

    def run(self) -> None:
        """Begin rank after rank until the run ends. Return in each rank."""
        for number in ASKING:
            signal.signal(number, self._forward)
        deaths = self._earlier()
        while True:
            if not (rank := self._begin(deaths)):
                return
            try:
                death = self._watch(rank, len(deaths))
                found = time.time()
                if death is None:
                    self._path.unlink(missing_ok=True)
                    # The torchrun of another host was faster to see that a host has come.
                    stopped = self._elastic and not self._asked and self._agreement.anybody("asked", len(deaths))
                    self._leave(TRAINING_EXIT_CODE if stopped else 0)
                if self._elastic and self._agreement.lost():
                    self._begin_elsewhere(rank, [*deaths, death.seen(found, time.time())], death.said)
                if why := why_it_ends([*deaths, death], self._restarts):
                    self._end(rank, death, why)
                rank.kill()
                self._agreement.say("gone", len(deaths))
                self._wait_for_all(deaths, found)
            # The store is gone, and with it the launcher or the first keeper.
            except RuntimeError as error:
                self._alone(rank, deaths, error)
            deaths.append(death.seen(found, time.time()))
            if self._elastic and (host := host_to_leave(deaths, self._hosts)):
                # A keeper that finds no store would take the host for lost.
                self._agreement.leave()
                why = f"{death.said}, as ranks there have before: {host} is left out"
                self._begin_elsewhere(None, deaths, why, left=host == socket.gethostname())
            again = f"all ranks begin again (restart {len(deaths)} of {self._restarts})"
            self._say(f"{death.said}: {again}{suspects(deaths)}")

    def _begin(self, deaths: Sequence[Death]) -> KeptRank | None:
        """Begin a rank and return it. In the rank itself, return None."""
        reader, writer = os.pipe()
        # A rank does not wait for a keeper that is stopped.
        os.set_blocking(writer, False)
        line = Lifeline(os.getpid(), writer, len(deaths), deaths[-1] if deaths else None)
        env = {KEEPER: line.to_env(), LAUNCHER: f"{line.keeper}"}
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)

        def enter() -> None:
            die_with_parent(line.keeper)
            for number, handler in self._handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        if not self._forks:
            words = [sys.executable, *sys.orig_argv[1:]]
            self._process = subprocess.Popen(words, env=os.environ | env, pass_fds=[writer], preexec_fn=enter)
            pid = self._process.pid
        elif not (pid := os.fork()):
            os.close(reader)
            os.environ.update(env)
            enter()
            return None
        os.close(writer)
        self._rank = KeptRank(pid, reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self._asked:
            os.kill(pid, signal.SIGTERM)
        return self._rank

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the rank. A terminal sends Ctrl-C to the rank as well, and the second one ends the run at
        once, so it is passed on as SIGTERM."""
        if self._rank and self._rank.code is None:
            twice = number == self._asked == signal.SIGINT
            told = signal.SIGKILL if twice else signal.SIGTERM if number == signal.SIGINT else number
            os.kill(self._rank.pid, told)
        self._asked = number

    def _look(self, rank: KeptRank) -> bool:
        """Look at the rank and at the launcher. Return whether the store may be asked again."""
        rank.look(TICK)
        if not self._agreement.due():
            return False
        self._agreement.beat()
        if self._launchers and launchers() != self._launchers:
            self._launchers = ()
            if self._elastic:
                # The other hosts go on.
                self._agreement.lose(self._agreement.rank, socket.gethostname(), "torchrun on its host is gone")
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _watch(self, rank: KeptRank, generation: int) -> Death | None:
        """Wait until the ranks of all keepers are done, or one has died. Return that death."""
        said = False
        while True:
            due = self._look(rank)
            if rank.code is not None and not said:
                said = rank.code <= 0 or time.time() - rank.ended > _GRACE
                if rank.code == 0:
                    if self._asked:
                        self._agreement.say("asked", generation)
                    self._agreement.say("done", generation)
                elif said:
                    self._agreement.report(self._death(rank, rank.code, generation))
            if due:
                if death := self._agreement.death(generation):
                    return death
                if rank.code == 0 and self._agreement.everybody("done", generation):
                    return None

    def _death(self, rank: KeptRank, code: int, generation: int) -> Death:
        # Torchrun asks ranks to end where it begins again.
        asked = not self._elastic and (self._asked or -code in ASKING or code >= 128)
        again = not asked and (code not in _NEVER_AGAIN or rank.memory)
        why = rank.why or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        where = self._agreement.rank, socket.gethostname()
        return Death(*where, code, why, rank.step, rank.ended, again, rank.memory, generation)

    def _wait_for_all(self, deaths: Sequence[Death], found: float) -> None:
        while not self._agreement.everybody("gone", len(deaths)):
            time.sleep(TICK)
            # Torchrun has seen that a host has come or is lost.
            told = self._elastic and self._asked
            self._agreement.beat(2 if told else self._patience, due=bool(told))
            if lost := self._agreement.lost():
                if self._elastic:
                    self._begin_elsewhere(None, [*deaths, lost.seen(found, time.time())], lost.said)
                self._end(None, lost, lost.said)
            if told:
                break
        if self._elastic and self._asked:
            os._exit(TRAINING_EXIT_CODE)

    # -- another world of torchrun ----------------------------------------------------------------------------------

    def _earlier(self) -> list[Death]:
        """Return the deaths in the worlds before; the same on all keepers. A file that is left of another job is not
        believed: at least one torchrun of a job lives in all of its worlds."""
        if not self._elastic:
            return []
        now, deaths = self._agreement.launchers(self._hosts), list[dict[str, Any]]()
        # Whatever else is in the file was not written by this release.
        with suppress(OSError, ValueError, TypeError, KeyError):
            earlier = json.loads(self._path.read_text())
            if not set(now).isdisjoint(earlier["launchers"]):
                deaths = [asdict(Death(**death)) for death in earlier["deaths"]]
        told = json.loads(self._agreement.told(json.dumps([now, deaths])))
        self._known = told[0]
        return [Death(**death) for death in told[1]]

    def _begin_elsewhere(
        self, rank: KeptRank | None, deaths: Sequence[Death], why: str, *, left: bool = False
    ) -> NoReturn:
        """End the world of these keepers, so that torchrun begins another one with the hosts that are left. If this
        host is `left` out, its torchrun ends."""
        if len(deaths) > self._restarts:
            self._end(
                rank, deaths[-1], f"{why}: after {many(self._restarts, 'restart')} training.restarts allows no more"
            )
        self._say(f"{why}: torchrun begins again without it (restart {len(deaths)} of {self._restarts})")
        if rank:
            rank.kill()
        own = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            own.write_text(json.dumps({"launchers": self._known, "deaths": [asdict(death) for death in deaths]}))
            os.replace(own, self._path)
        if left:
            os.kill(os.getppid(), signal.SIGTERM)
        sys.stderr.flush()
        os._exit(TRAINING_EXIT_CODE)

    def _end(self, rank: KeptRank | None, death: Death, why: str) -> NoReturn:
        """End the run on this keeper with the exit code of the rank that died."""
        if rank:
            rank.kill()
        if self._elastic:
            # Torchrun would begin again.
            self._path.unlink(missing_ok=True)
            os.kill(os.getppid(), signal.SIGTERM)
        # A rank that fails by itself has said why.
        if death.again or death.code <= 0:
            self._say(f"error: {why}")
        if death.code < 0 and not death.again:
            self._leave(128 - death.code)
        # An error without an exit code of its own has 1.
        self._leave(max(death.code, TRAINING_EXIT_CODE) if death.again or death.code <= 0 else death.code)

    def _alone(self, rank: KeptRank, deaths: Sequence[Death], error: RuntimeError) -> NoReturn:
        """Let the rank save and stop, where the other keepers cannot be asked any more."""
        if self._elastic:
            now, why = time.time(), "its keeper, which had the keepers' store, is gone"
            lost = Death(0, os.environ["MASTER_ADDR"], 0, why, 0, now, again=False, found=now, down=now, lost=True)
            self._begin_elsewhere(rank, [*deaths, lost], lost.said)
        self._say(f"the keepers have lost their store ({f'{error}'.splitlines()[0]}): the run saves and stops")
        if rank.code is None:
            os.kill(rank.pid, signal.SIGTERM)
        while rank.code is None:
            rank.look(TICK)
        os._exit(rank.code if rank.code >= 0 else TRAINING_EXIT_CODE)

    def _leave(self, code: int) -> NoReturn:
        with suppress(RuntimeError):
            self._agreement.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
