"""Fork processes from one that has imported everything. They are as fresh as new ones and save the time of the
imports."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import held

# The modules that a run imports, late imports too. The ranks of one world inherit one hash seed from this process,
# which the ranks of real launchers do not.
IMPORTED = [
    "sagetrain.cli.main",
    "sagetrain.config.check",
    "sagetrain.engines.fsdp",
    "sagetrain.interop.lm_eval",
    "sagetrain.training.trainer",
    "deepspeed.launcher.runner",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "deepspeed.module_inject.auto_ep_layer",
    "pytest",  # Every test module imports pytest.
    "compiled_before",
    "plenty",
]
# The longest time in seconds to wait for any process of a test. It is ten times what the slowest takes on an idle
# machine, and less than pytest's own limit (pyproject.toml).
PATIENCE = 1200.0
COMMANDS = {
    "sagetrain": ("sagetrain.__main__", "program"),
    "deepspeed": ("deepspeed.launcher.runner", "main"),
    "torchrun": ("torch.distributed.run", "main"),
    "ranks": ("forked", "main"),
    "python": ("forked", "script"),
    "interpreter": ("stand_in", "serve"),
}


def until(
    ready: Callable[[], object], alive: Callable[[], object] = lambda: True, said: Callable[[], str] = str
) -> None:
    """Wait until `ready`. If that takes longer than PATIENCE, or what makes it ready is not `alive` any more, the test
    fails with what is `said` then."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert alive() and time.monotonic() < deadline, said()
        time.sleep(0.005)


def context() -> multiprocessing.context.BaseContext:
    """Return the context that forks the processes. With a GPU each process imports for itself, because CUDA does not
    survive a fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else IMPORTED)
    # The fork server would not find this folder otherwise. A checkout in PYTHONPATH goes before an installed one.
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(folders)):
        forkserver.ensure_running()
    return context


def serve() -> None:
    """Import everything here and fork the server from this process, which saves the server its own imports. The
    processes that are forked from this one later have the same server."""
    gc.disable()  # What is imported stays.
    for name in IMPORTED:
        import_module(name)
    gc.enable()
    resource_tracker.ensure_running()
    server, address = forkserver._forkserver, connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        receiver, sender = os.pipe()
        if not os.fork():
            try:
                os.close(sender)  # The server ends when nobody holds this end of the pipe any longer.
                forkserver.main(listener.fileno(), receiver, [])
            finally:
                os._exit(0)
        os.close(receiver)
    server._forkserver_address, server._forkserver_alive_fd = address, sender
    server.ensure_running = forkserver.ensure_running = lambda: None


class Command:
    """A console script (one of COMMANDS, with its arguments) in a process and session of its own; like
    subprocess.Popen.

    Its output is appended to the file `log`. Errors go there too, or to the file `errors` if one is named. The script
    sees the network, the host name and the files that the process `host` sees, if one is given.
    """

    running: list[Command] = []

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        errors: Path | None = None,
        host: int | None = None,
    ):
        self._process = context().Process(
            target=_run, args=(list(words), dict(env), str(log), str(errors or log), str(cwd), host)
        )
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
        """Kill the processes that a failed test has left running, because other tests measure times."""
        while cls.running:
            command = cls.running.pop()
            if command.returncode is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()


def enter(env: Mapping[str, str], log: str, errors: str) -> None:
    """Take over the environment and the output files in a forked process. The parent of the fork knows neither."""
    gc.freeze()  # Frozen imports are skipped by every garbage collection, which would take half a second each.
    # A process that is woken up waits for the running one to pause. A rank that interrupted the sender of a message
    # would find its connection locked, and gloo would ask for the lock again and again: half of the time of a
    # collective.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _take(env)
    for number, stream, path in ((1, sys.stdout, log), (2, sys.stderr, errors)):
        stream.flush()
        output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, number)
        os.close(output)


def _take(env: Mapping[str, str]) -> None:
    """Replace the environment, and show the rank in the process's name.

    runs.ranks_of reads the rank from the name, because /proc/PID/environ of a fork shows what its parent began with.
    """
    os.environ.clear()
    os.environ.update(env)
    sys.executable = env.get("STAND_IN", sys.executable)
    if threads := env.get("OMP_NUM_THREADS"):  # torch has read this variable already, before the fork.
        torch.set_num_threads(int(threads))
    if "RANK" in env:
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}")
    if "HELD" in env:
        held.wait_here()


def join_host(process: int) -> None:
    """Enter the network, the host name and the files that another process sees."""
    for kind in ("net", "uts", "mnt"):
        if os.readlink(f"/proc/{process}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):
            continue  # Entering a namespace needs root, and this one is shared already.
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind} namespace of process {process}")


def _run(words: list[str], env: dict[str, str], log: str, errors: str, cwd: str, host: int | None) -> None:
    os.setsid()
    if host:
        join_host(host)
    os.chdir(cwd)
    enter(env, log, errors)
    _command(words)


def call(name: str) -> None:
    """Call the function that the console script calls."""
    if name in ("deepspeed", "python"):
        subprocess.Popen = Launched
    elif name == "torchrun":
        Launched.spares = [Spare() for _ in range(int(sys.argv[sys.argv.index("--nproc-per-node") + 1]))]
        subprocess_handler.Popen = Launched
        # Events of torchrun have the name of a method, for which it looks at all modules: seconds, where all are here.
        dynamic_rendezvous.get_method_name = lambda depth=2: "method"
    module, function = COMMANDS[name]
    getattr(import_module(module), function)()


class Launched(subprocess.Popen):
    """Fork the Python programs that a launcher starts, with everything imported; execute other programs.

    The launcher's own code runs. Both levels of DeepSpeed's launcher fork. torchrun has threads, and a fork of it would
    find their locks taken for ever. A spare child, which was forked before the threads began, becomes the program
    instead.
    """

    spares: list[Spare] = []

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *how) -> None:
        files, env, new_session = how[3:9], os.environ if env is None else env, how[14]
        if args[:2] == [sys.executable, "-u"] or args[:2] == (sys.executable, "-u"):
            words, run = list(args[2:]), program
        elif args[0] == str(Path(sys.executable).with_name("deepspeed")):
            words, run = ["deepspeed", *args[1:]], _command
        else:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *how)
            return

        def child() -> None:
            if new_session:
                os.setsid()
            for number, file in enumerate((files[0], files[3], files[5])):
                if file != -1:
                    os.dup2(file, number)
            run(words)

        self.pid = self.spares.pop().become(words, env) if self.spares else fork(child, env)
        self._child_created = True
        self._close_pipe_fds(*files)


class Spare:
    """A child of this process, in a session of its own, that waits to be told which Python program it is to run."""

    def __init__(self) -> None:
        receiver, self._sender = multiprocessing.Pipe(duplex=False)
        self.pid = fork(lambda: self._wait(receiver), os.environ)

    def become(self, words: list[str], env: dict[str, str]) -> int:
        """Let the child run `python WORDS` in this environment, and return its process id."""
        self._sender.send((words, env))
        return self.pid

    def _wait(self, receiver: connection.Connection) -> None:
        os.setsid()
        self._sender.close()
        try:
            words, env = receiver.recv()
        except EOFError:  # The launcher has ended and has no use for this child.
            return
        _take(env)
        program(words)


def _command(words: list[str]) -> None:
    """Run a console script."""
    _show(words)
    sys.argv = words
    call(words[0])


def program(words: list[str]) -> None:
    """Run `python WORDS`, where WORDS begins with a file or with -m and a module."""
    _show([sys.executable, *words])
    run, sys.argv = (runpy.run_module, words[1:]) if words[0] == "-m" else (runpy.run_path, words)
    run(sys.argv[0], run_name="__main__")


def _show(words: list[str]) -> None:
    """Make these words the command line of this process, where a fork shows its parent's. Ranks know DeepSpeed's
    launchers by their command lines."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(line.ljust(end - start, b"\0"))


def main() -> None:
    """Run `ranks COUNT PORT WORDS`: `sagetrain WORDS` on COUNT ranks, by a launcher that takes no time.

    When one rank fails, the others get SIGTERM, and the exit code is that of the first. This process ignores SIGTERM,
    which is meant for the ranks alone.
    """
    count, port, *words = sys.argv[1:]
    sys.argv = ["sagetrain", *words]
    here = {
        **os.environ,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = {
        fork(lambda: call("sagetrain"), {**here, "RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(int(count)))
    }
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    sys.exit(abs(code))


def script() -> None:
    """Run `python FILE WORDS`, with everything imported."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def fork(act: Callable[[], None], env: Mapping[str, str]) -> int:
    """Call `act` in a child with this environment; the child ends as an interpreter would end after it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code: object = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # A program begins with these handlers.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _take(env)
        act()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
