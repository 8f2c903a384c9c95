"""Run GPU tests in processes side by side on all GPUs of a host: python tests/support/side_by_side.py [--processes N]
ARGUMENTS OF PYTEST

This process imports the libraries once and forks the others, which takes seconds where each of them would take half a
minute beside the others. A process takes the next test when it has ended one. The tests that took longest come first.
"""

import contextlib
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe, connection
from typing import Any

# The libraries find out whether there is a GPU. A process that had used one could not be forked.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Runs would learn from earlier ones on this host what `auto` has chosen.
os.environ["SAGETRAIN_CACHE"] = os.devnull

import pytest
import torch

from gpu_seen import Recorder, Seen, test_of

PER_GPU = 12
"""The largest number of processes on one GPU. Tests with the largest tensors (20 GiB) may meet."""
CORES = len(os.sched_getaffinity(0))
UNKNOWN = float("inf")
"""The seconds that a test is taken to need before it was ever timed. If it is long, it has begun in time."""
IMPORTED = [
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.testing",
    "torch.profiler",
    "triton.language",
    "sagekernels",
    "sagekernels.testing",
    "sagetrain.api",
    "sagetrain.config.check",
    "sagetrain.training.build_run",
    "sagetrain.training.trainer",
    "sagetrain.engines.fsdp",
    "sagetrain.inference.generate",
    "deepspeed",
    "transformers.models.llama.modeling_llama",
    "tiny",
    "saved_runs",
    "prepare_inputs",
]

HIDDEN = ["torchao"]
"""Packages that use a GPU when they are imported. transformers imports them where they are installed."""


def number_of_processes(gpus: int) -> int:
    """Three of four cores: kernels are compiled most of the time, and CUDA's own threads need the rest."""
    return max(1, min(PER_GPU * gpus, 3 * CORES // 4))


def share_of(process: int, processes: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a process. It sees all GPUs, so that tests of several GPUs find them, and begins to count
    at its own. Its share of the cores computes, and Triton kernels are compiled in the process itself: a pool of
    processes for each test process would take longer to start than it saves."""
    first, threads = process % len(gpus), str(max(1, CORES // processes))
    visible = ",".join([*gpus[first:], *gpus[:first]])
    return {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def uses_gpu() -> bool:
    """Whether this process has initialized the driver of CUDA, for which its forks would find no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != 3  # CUDA_ERROR_NOT_INITIALIZED


def longest_first(nodeids: Sequence[str], seconds: Mapping[str, float]) -> list[int]:
    """Return the places of tests in the order in which they begin."""
    return sorted(range(len(nodeids)), key=lambda place: -seconds.get(test_of(nodeids[place]), UNKNOWN))


def import_libraries() -> None:
    """Import the libraries, as if those that use a GPU when they are imported were not installed."""
    hidden = [name for name in HIDDEN if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        for name in IMPORTED:
            with contextlib.suppress(ImportError):  # Hosts with GPUs may lack some.
                import_module(name)
            if uses_gpu():
                sys.exit(
                    f"the import of {name} uses a GPU, or that of a package which {name} imports, and then no process "
                    "can be forked: name that package in HIDDEN, or run the tests in one process, make test-gpu "
                    "GPU_JOBS=1"
                )
    finally:
        for name in hidden:
            del sys.modules[name]


class Child:
    """A pytest plugin: collect the tests, and run those that the parent asks for."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._pipe.send(("collected", [(item.nodeid, item.location) for item in session.items]))
        while (place := self._pipe.recv()) is not None:
            item = session.items[place]
            session._setupstate.teardown_exact(item)  # Fixtures of modules stay until a test of another one comes.
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=item)
            self._pipe.send(("ended", place))
        session._setupstate.teardown_exact(None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._pipe.send(("broken", f"{report.nodeid}: {report.longreprtext}"))

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config


class Parent:
    """A pytest plugin: deal out the tests, and tell the other plugins how they fare."""

    def __init__(self, pipes: Sequence[Any], logs: Sequence[str]) -> None:
        self._logs = dict(zip(pipes, logs, strict=True))
        self._tests: list[tuple[str, tuple]] = []
        self._left: deque[int] = deque()
        self._running: dict[Any, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # The children collect.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        pipes = set(self._logs)
        while pipes:
            for pipe in connection.wait(list(pipes)):
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    pipes.discard(pipe)
                    self._died(session, pipe)
                    continue
                if kind == "report":
                    report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
                    session.config.hook.pytest_runtest_logreport(report=report)
                elif kind == "broken":
                    raise pytest.UsageError(value)
                else:
                    if kind == "collected":
                        self._collected(session, value)
                    if not self._next(session, pipe):
                        pipes.discard(pipe)  # Nobody waits for what a process still has to take down.
        if not self._tests:
            raise pytest.UsageError("no process came as far as collecting tests")
        return True

    def _collected(self, session: pytest.Session, tests: list[tuple[str, tuple]]) -> None:
        if not self._tests:
            self._tests, session.testscollected = tests, len(tests)
            nodeids = [nodeid for nodeid, _ in tests]
            self._left.extend(longest_first(nodeids, Seen().seconds()))
            for plugin in session.config.pluginmanager.get_plugins():
                if isinstance(plugin, Recorder):
                    plugin.expect(nodeids)
        elif tests != self._tests:
            raise pytest.UsageError("two processes have collected other tests; set PYTHONHASHSEED")

    def _next(self, session: pytest.Session, pipe: Any) -> bool:
        """Give a process its next test, and return whether there is one."""
        self._running.pop(pipe, None)
        place = self._left.popleft() if self._left else None
        pipe.send(place)
        if place is not None:
            self._running[pipe] = place
            nodeid, location = self._tests[place]
            session.config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        return place is not None

    def _died(self, session: pytest.Session, pipe: Any) -> None:
        place = self._running.pop(pipe, None)
        with open(self._logs[pipe], errors="replace") as log:
            text = log.read()[-3000:]
        if place is not None:
            nodeid, location = self._tests[place]
            report = pytest.TestReport(nodeid, location, {}, "failed", f"the process has died: {text}", "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        elif not self._tests:
            print(text)


def child(pipe: Any, variables: Mapping[str, str], log: str, words: list[str]) -> None:
    """Be one of the processes, from the fork to the end."""
    os.setpgid(0, 0)  # An interrupt is for the parent, which ends this process.
    os.environ.update(variables, SIDE_BY_SIDE="1")
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        pytest.main([*words, "-p", "no:cacheprovider"], plugins=[Child(pipe)])
    finally:
        sys.stdout.flush()
        os._exit(0)


def main(words: list[str]) -> int:
    began, gpus, processes = time.monotonic(), torch.cuda.device_count(), 0
    if "--processes" in words:
        at = words.index("--processes")
        processes = int(words[at + 1])
        del words[at : at + 2]
    processes = processes or number_of_processes(gpus)
    torch.set_num_threads(1)  # Threads do not survive a fork.
    gc.disable()
    if processes > 1:
        import_libraries()
    gc.freeze()  # No garbage collection looks at the imports, now or later.
    gc.enable()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    folder = tempfile.mkdtemp(prefix="side-by-side-")
    pipes, pids, logs = [], [], []
    for number in range(processes):
        ours, theirs = Pipe()
        logs.append(f"{folder}/{number}.log")
        pid = os.fork()
        if not pid:
            for pipe in (ours, *pipes):
                pipe.close()
            child(theirs, share_of(number, processes, given.split(",")), logs[-1], words)
        theirs.close()
        pipes.append(ours)
        pids.append(pid)
    print(f"{processes} processes on {gpus} GPUs, forked after {time.monotonic() - began:.1f} s")
    try:
        return pytest.main([*words, "-p", "gpu_seen", "-p", "no:cacheprovider"], plugins=[Parent(pipes, logs)])
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 9)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # Taking all imports down in order would take seconds.
