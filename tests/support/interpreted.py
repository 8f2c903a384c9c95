"""Run files of tests on Triton's interpreter.

Triton reads TRITON_INTERPRET when its functions are decorated, so the cases run in a process of their own.
"""

import inspect
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
"""True in the process that interprets."""
FILES = sorted((Path(__file__).parents[1] / "kernels").glob("test_*_interpreter.py"))
_started: list[tuple[int, subprocess.Popen, IO[bytes]]] = []
"""The one who started the process, the process and its output. It is empty until then. Forks inherit it."""


def start() -> None:
    """Start the process that interprets. The whole suite does so before it collects its tests, which leaves all but one
    CPU idle."""
    # Plugins would take as long to import as torch.
    options = ["-q", "--noconftest", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
    command = ["sh", "-c", '"$@"; echo "exit code $?"', "sh", sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open until it is read
    how = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    _started.append((os.getpid(), subprocess.Popen([*command, *map(str, FILES)], **how), output))


def run_interpreted() -> None:
    """Run the tests of FILES in a process that interprets, or wait for it if a parent of this process has started
    it."""
    if not _started:
        start()
    *_, output = _started[0]
    # Only the process that started it could wait for it in the usual way.
    while not re.search(r"exit code \d+\n$", said := os.pread(output.fileno(), 10_000_000, 0).decode()):
        time.sleep(0.2)
    assert said.endswith("exit code 0\n"), said[-7000:]


def stop() -> None:
    """End the process if this one has started it and it has not ended."""
    for starter, process, _ in _started:
        if starter == os.getpid() and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN and largest integers. torch's own function for it imports the compiler."""
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    yield
    torch._C._set_deterministic_algorithms(False, warn_only=False)


def planted(module: ModuleType, kernel: str, right: str, wrong: str) -> triton.runtime.JITFunction:
    """Return a kernel with a mistake in its source."""
    source = textwrap.dedent(inspect.getsource(getattr(module, kernel).fn))
    assert source.count(right) == 1, (kernel, right)
    name = f"<{kernel} with {wrong}>"
    source = source.replace(right, wrong)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, object] = {}
    exec(compile(source, name, "exec"), vars(module), names)
    return names[kernel]


Mistakes = list[tuple[str, str, str]]


def find(monkeypatch: pytest.MonkeyPatch, check: Callable[[], None], module: ModuleType, mistakes: Mistakes) -> None:
    """Check that the comparison with the twin fails with each planted mistake, and only then."""
    check()
    for mistake in mistakes:
        with monkeypatch.context() as patched:
            patched.setattr(module, mistake[0], planted(module, *mistake))
            with pytest.raises(AssertionError):
                check()


def _patch_once(patch: Callable) -> Callable:
    """Let Triton replace the operations of its language once and for all.

    The interpreter replaces some hundred operations for a kernel, puts them back behind it, and replaces them again for
    each call of a function inside the kernel. That takes a third of the time of the tests.
    """

    def wrapper(function: Callable) -> interpreter._LangPatchScope:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            patch(function)  # What it returns would put them back.
        return interpreter._LangPatchScope()

    return wrapper


def _remembering(numpy_dtype: Callable) -> Callable:
    """Remember numpy's name of each type. Triton builds a table of all types whenever it asks for one."""
    found: dict[str, object] = {}

    def wrapper(kind: tl.dtype) -> object:
        scalar = kind.scalar  # A block has the type of its elements.
        if scalar.name not in found:
            found[scalar.name] = numpy_dtype(scalar)
        return found[scalar.name]

    return wrapper


if INSIDE:
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
