"""Compile Triton kernels without a GPU, and read the machine code of a cubin with the tools that triton brings:
registers, spills, instructions of the main loop."""

import re
import subprocess
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
LABEL = re.compile(r"^\s*(\.L\w+):")


def compiled(
    function: triton.JITFunction,
    architecture: int,
    constants: Mapping[str, object],
    types: Mapping[str, str],
    uneven: Container[str] = (),
    **options: object,
) -> CompiledKernel:
    """Compile a kernel as it is launched for sizes that are multiples of 16, except the `uneven` ones. ptxas takes it.
    An argument without a type is an integer."""
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    even = [i for i, name in enumerate(names)
            if not signature[name].startswith(("constexpr", "tensordesc")) and name not in uneven]  # fmt: skip
    source = ASTSource(function, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in even})
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it has in memory for values that do not fit them."""
    (folder / "kernel.cubin").write_bytes(cubin)
    usage = _said("cuobjdump", "-res-usage", folder / "kernel.cubin")
    registers, stack = re.search(r"REG:(\d+).*?STACK:(\d+)", usage).groups()
    return int(registers), int(stack)


def _said(tool: str, option: str, file: Path) -> str:
    return subprocess.run([TOOLS / tool, option, file], capture_output=True, text=True, check=True).stdout


class Sass(NamedTuple):
    """The code that ptxas made of a kernel."""

    registers: int
    stack: int
    """Bytes that a thread has in memory for values that do not fit its registers."""
    loop: Counter[str]
    """Instructions of a loop that multiplies, by name up to the first dot; branches taken seldom are included."""


def disassembled(cubin: bytes, folder: Path, product: str = "HMMA") -> Sass:
    """Read a cubin of one kernel. Its loop is the longest one with this product of a warp, or the shortest one with a
    product of a warpgroup."""
    registers, stack = resources(cubin, folder)
    labels, names, targets = {}, [], []
    for line in _said("nvdisasm", "-c", folder / "kernel.cubin").splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := INSTRUCTION.match(line):
            name = found[1].split(".")[0]
            # A CALL to a label jumps within the kernel.
            names.append("jump" if name == "CALL" and ".L" in found[2] else name)
            target = re.search(r"\.L\w+", found[2]) if name == "BRA" else None
            targets.append(target[0] if target else None)
    loops = [(labels[t], i) for i, t in enumerate(targets) if t and labels[t] <= i]
    multiplying = [names[a : b + 1] for a, b in loops if product in names[a : b + 1]]
    loop = Counter((max if product == "HMMA" else min)(multiplying, key=len, default=[]))
    return Sass(registers, stack, loop)
