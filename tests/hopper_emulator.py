"""Runs the text of a Hopper kernel on the CPU: compiles it with hopper_emulator.h, launches it as nvrtc.Kernel does."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sagekernels import nvrtc

HERE = Path(__file__).parent
LAUNCH = """
extern "C" const char *launch(int grid, int threads, int resident, int seed, int mistake, void **values) {
    random_bits = seed, mutant = mistake;
    with_arguments(%s, values);
    run(grid, threads, resident);
    return failure.c_str();
}
"""


class TensorMap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("base", "element", "swizzle")]
    _fields_ += [(name, ctypes.c_int64 * 4) for name in ("size", "stride", "box")]


def tensor_map(x: Tensor, box: Sequence[int], swizzle: int = 128) -> TensorMap:
    """Of nvrtc.tensor_map, for the emulator."""
    fill = [1] * (4 - x.dim())
    strides = [s * x.element_size() for s in x.stride()[::-1]]
    lists = [[*x.shape[::-1], *fill], [*strides, *fill], [*box[::-1], *fill]]
    return TensorMap(x.data_ptr(), x.element_size(), swizzle, *((ctypes.c_int64 * 4)(*y) for y in lists))


class Emulated:
    """One kernel, compiled with these macros. It can make mistakes: each replaces expressions or statements (;)."""

    def __init__(
        self, folder: Path, source: str, name: str, defines: Mapping[str, int], mistakes: Sequence[dict[str, str]] = ()
    ) -> None:
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        text = (nvrtc.HERE / source).read_text().replace('"hopper.cuh"', '"hopper_emulator.h"')
        for i, mistake in enumerate(mistakes, 1):
            for right, wrong in mistake.items():
                assert text.count(right) == 1, right
                choice = "if (mutant == %d) { %s } else { %s }" if right.endswith(";") else "(mutant == %d ? %s : %s)"
                text = text.replace(right, choice % (i, wrong, right))
        program = folder / ("_".join([name, *map(str, defines.values()), str(len(mistakes))]) + ".cpp")
        program.write_text(text + LAUNCH % name)
        library = program.with_suffix(".so")
        options = [*(f"-D{key}={value}" for key, value in defines.items()), f"-I{nvrtc.HERE}", f"-I{HERE}", "-w"]
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *options, str(program), "-o", str(library)]
        subprocess.run(command, check=True)
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_char_p

    def __call__(self, grid: int, threads: int, *arguments, seed: int = 0, resident: int = 2, mistake: int = 0) -> str:
        """What went wrong, or an empty string."""
        values, pointers = [], (ctypes.c_void_p * len(arguments))()
        for i, x in enumerate(arguments):
            if isinstance(x, Tensor) or x is None:
                x = ctypes.c_void_p(None if x is None else x.data_ptr())
            elif not isinstance(x, TensorMap):
                x = ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int32(x)
            values.append(x)
            pointers[i] = ctypes.addressof(x)
        return self._launch(grid, threads, resident, seed, mistake, pointers).decode()


def wrong_results(run: Callable[..., Sequence[Tensor]], right: Callable[[str], Sequence[Tensor]], mistake: int) -> str:
    """What shows that a kernel makes a mistake: a message, or other bits than it has without; "" if nothing does."""
    for case in ("documents", "other"):
        for seed in range(12):
            try:
                found = run(case=case, seed=seed, mistake=mistake)
            except AssertionError as error:
                return str(error)
            if not all(torch.equal(x, y) for x, y in zip(found, right(case), strict=True)):
                return "other bits"
    return ""
