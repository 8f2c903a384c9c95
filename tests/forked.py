"""Processes forked from one that has imported everything: as fresh as new ones, without the time that imports take."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch

# What a run imports, late imports too. Ranks of one world also get one hash seed from it; those of launchers do not.
IMPORTED = [
    "sagetrain.cli",
    "sagetrain.config.check",
    "sagetrain.train.trainer",
    "deepspeed.launcher.runner",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "torch.utils.tensorboard",
]
# Seconds that any process of a test is waited for: ten times what the slowest takes on an idle machine, and more.
PATIENCE = 600.0
COMMANDS = {
    "sagetrain": "sagetrain.cli",
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
}


def context() -> multiprocessing.context.BaseContext:
    """Where such processes come from. With a GPU each imports for itself, as CUDA does not survive a fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else IMPORTED)
    return context


class Command:
    """A console script (a key of COMMANDS) in a process and a session of its own; used like a subprocess.Popen.

    Both its outputs are appended to the file `log`.
    """

    running: list[Command] = []

    def __init__(self, name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path):
        words = [name, *map(str, arguments)]
        self._process = context().Process(target=_run, args=(words, dict(env), str(log), str(cwd)))
        self._process.start()
        self.args, self.pid = words, self._process.pid
        Command.running.append(self)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @classmethod
    def end_all(cls) -> None:
        """Kill what a failed test has left running: others are timed."""
        while cls.running:
            command = cls.running.pop()
            if command.returncode is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()


def enter(env: Mapping[str, str], log: str) -> None:
    """Take over environment and output file in a process that is forked, whose parent knows neither."""
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(output, number)
    os.close(output)


def _run(words: list[str], env: dict[str, str], log: str, cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    enter(env, log)
    sys.argv = words
    import_module(COMMANDS[words[0]]).main()
