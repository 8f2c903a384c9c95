"""Run the source of a CUDA kernel on the CPU. The source is compiled with hopper_emulator.h or mma_emulator.h and
launched as nvrtc.Kernel does."""

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sagekernels import nvrtc

HERE = Path(__file__).parent
STAND_INS = {"hopper": "hopper_emulator", "mma": "mma_emulator", "device": "mma_emulator"}
INCLUDED = re.compile(r'#include "(\w+\.cuh)"')
KERNEL = re.compile(r'extern "C" __global__ void(?: (?:__launch_bounds__|CLUSTER_OF)\([^)]*\))* (\w+)\(')
LAUNCH = """
extern "C" const char *launch_%s(int grid, int threads, int resident, int seed, int mistake, void **values) {
    random_bits = seed, mutant = mistake;
    with_arguments(::%s, values);
    run(grid, threads, resident);
    return failure.c_str();
}
"""
FLAGS = ("CAUSAL", "PACKED", "FP16", "SMOOTH", "SINKS")
"""Macros that kernels use in expressions alone. They are variables of the emulator, so one library serves all their
values."""
OF_FLAGS = re.compile(rf"constexpr (\w+) (\w+) = (.*\b(?:{'|'.join(FLAGS)})\b.*);")
COMPILER = ["g++", "-std=c++17", "-O1", "-fPIC", "-w"]


@functools.cache
def standard_library() -> str:
    """Compile the headers of the standard library that emulators include, once for all kernels of this process.

    Parsing them takes a third of the time of a compilation.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    header = Path(folder.name) / "standard_library.h"
    text = "".join((HERE / f"{name}.h").read_text() for name in {"emulator", *STAND_INS.values()})
    header.write_text("\n".join(sorted({*re.findall(r"^#include <.*>$", text, re.MULTILINE)})))
    subprocess.run([*COMPILER, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return str(header)


def storage_bytes(x: Tensor) -> int:
    """Return the bytes of memory from the first element of x to the last one."""
    return x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))


class TensorMap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("base", "element", "swizzle")]
    _fields_ += [(name, ctypes.c_int64 * 4) for name in ("size", "stride", "box")]


def tensor_map(x: Tensor, box: Sequence[int], swizzle: int = 128) -> TensorMap:
    """Build the emulator's version of nvrtc.tensor_map."""
    fill = [1] * (4 - x.dim())
    strides = [s * x.element_size() for s in x.stride()[::-1]]
    lists = [[*x.shape[::-1], *fill], [*strides, *fill], [*box[::-1], *fill]]
    return TensorMap(x.data_ptr(), x.element_size(), swizzle, *((ctypes.c_int64 * 4)(*y) for y in lists))


class Emulated:
    """One kernel, compiled with these macros. It can make planted mistakes. Each mistake replaces expressions of the
    source, or statements if the text ends with `;` or with a comment behind it."""

    def __init__(
        self, folder: Path, source: str, name: str, defines: Mapping[str, int], mistakes: Sequence[dict[str, str]] = ()
    ) -> None:
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        text = (nvrtc.HERE / source).read_text()
        for header, stand_in in STAND_INS.items():
            text = text.replace(f'"{header}.cuh"', f'"{stand_in}.h"')
        text = INCLUDED.sub(lambda found: (nvrtc.HERE / found[1]).read_text(), text)
        for i, mistake in enumerate(mistakes, 1):
            for right, wrong in mistake.items():
                assert text.count(right) == 1, right
                statement = right.split("//")[0].rstrip().endswith(";")
                choice = "if (mutant == %d) { %s\n} else { %s\n}" if statement else "(mutant == %d ? %s : %s)"
                text = text.replace(right, choice % (i, wrong, right))
        text = OF_FLAGS.sub(r"#define \2 (\1)(\3)", text)
        self._flags = {key: value for key, value in defines.items() if key in FLAGS}
        defines = {key: value for key, value in defines.items() if key not in FLAGS}
        program = folder / ("_".join([source, *map(str, defines.values()), str(len(mistakes))]) + ".cpp")
        library = program.with_suffix(".so")
        if not library.exists():  # The library holds all kernels of the source file.
            program.write_text(text + "".join(LAUNCH % (kernel, kernel) for kernel in KERNEL.findall(text)))
            self._compile(program, library, defines)
        self._library = ctypes.CDLL(str(library))
        self._launch = getattr(self._library, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p

    def _compile(self, program: Path, library: Path, defines: Mapping[str, int]) -> None:
        options = [*(f"-D{key}={value}" for key, value in defines.items()), f"-I{nvrtc.HERE}", f"-I{HERE}"]
        command = [*COMPILER, "-shared", "-include", standard_library(), *options, str(program), "-o", str(library)]
        subprocess.run(command, check=True)

    def __call__(self, grid: int, threads: int, *arguments, seed: int = 0, resident: int = 2, mistake: int = 0) -> str:
        """Launch the kernel. Return a message about what went wrong, or an empty string."""
        for key, value in self._flags.items():
            ctypes.c_int.in_dll(self._library, key).value = value
        values, pointers = [], (ctypes.c_void_p * len(arguments))()
        if hasattr(self._library, "may_copy_from"):
            for address, bytes in [
                (None, 0),
                *((x.data_ptr(), storage_bytes(x)) for x in arguments if torch.is_tensor(x)),
            ]:
                self._library.may_copy_from(ctypes.c_void_p(address), ctypes.c_int64(bytes))
        for i, x in enumerate(arguments):
            if isinstance(x, Tensor) or x is None:
                x = ctypes.c_void_p(None if x is None else x.data_ptr())
            elif not isinstance(x, TensorMap):
                x = ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int32(x)
            values.append(x)
            pointers[i] = ctypes.addressof(x)
        return self._launch(grid, threads, resident, seed, mistake, pointers).decode()


def wrong_results(
    run: Callable[..., Sequence[Tensor]], kernels: Callable[..., Emulated], mistake: int, seeds: int = 12
) -> str:
    """Return how a planted mistake shows in one of two inputs and several seeds: a message, or "other bits" than
    without it. "": nothing shows it."""
    for seed in range(seeds):
        for case in ("documents", "other"):
            try:
                found = run(kernels, case, seed=seed, mistake=mistake)
            except AssertionError as error:
                return str(error)
            if not all(map(torch.equal, found, _right_results(run, kernels, case))):
                return "other bits"
    return ""


@functools.cache
def _right_results(
    run: Callable[..., Sequence[Tensor]], kernels: Callable[..., Emulated], case: str
) -> Sequence[Tensor]:
    return run(kernels, case)
