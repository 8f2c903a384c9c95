"""Run files of tests on Triton's interpreter.

Triton reads TRITON_INTERPRET when its functions are decorated, so the cases run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
"""True in the process that interprets."""


def run_interpreted(files: Iterable[Path]) -> None:
    """Run the tests of files in a process that interprets."""
    # Plugins would take as long to import as torch.
    options = ["-q", "--noconftest", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN and largest integers. torch's own function for it imports the compiler."""
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    yield
    torch._C._set_deterministic_algorithms(False, warn_only=False)


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
