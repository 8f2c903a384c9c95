"""Time the attention kernels of other GPUs on a Hopper GPU, beside FlashAttention-2.

No other GPU was available for this. The portable kernels are compiled as for an A100 (mma.sync, cp.async), and their
PTX is assembled for the GPU at hand. The CUDA kernels of sm_80 are built from the same instructions. "Throttled"
simulates a GeForce card: each tensor-core instruction is followed by idle ones, until one product takes as many cycles
as on an RTX 4090. Results stay correct. Each way is compared with float64 before it is timed. A way that is wrong is
named and not timed.

    python results/attention-elsewhere/elsewhere.py --out FOLDER [--before PACKAGE] [--tiles]

This script is frozen. It runs with the library as it was at commit e9f7a5cf.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import pkgutil
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import sagekernels
from sagekernels import bench, nvrtc, tune
from sagekernels.admission import LIMITS, Admission, admit
from sagekernels.testing import Shape, random_inputs

AMPERE = GPUTarget("cuda", 80, 32)
SCORES = 128 * 64
"""Number of scores of the tile that cycles are reported for, at head_dim 128."""
# These are the cycles of a multiprocessor of an RTX 4090 for one product of such a tile, by the type of the sums.
GEFORCE = {"s32": 1024, "f16": 2048, "f32": 4096}
# These are the cycles of FlashAttention-2 for such a tile there: 2 and 5 products at 0.92 and 0.91 of the peak, as
# others report.
FA2_ON_GEFORCE = {"forward": 2 * 4096 / 0.92, "backward": 5 * 4096 / 0.91}

MMA = re.compile(
    r"mma\.sync\.aligned\.\S*?\.(s32|f16|f32)\.\S+\s*\{([^}]*)\},\s*\{([^}]*)\},\s*\{([^}]*)\},\s*\{([^}]*)\};"
)
MASKS = ("full", "causal")
"""The masks without documents, by whether attention is causal."""
IDLE = 4
"""Number of sums that the added instructions write to, in turn. With fewer they would wait for each other."""


def throttled(ptx: str, times: dict[str, float], sums: int = IDLE) -> str:
    """Issue each mma.sync of a kernel `times` times, by the type of its sums, into registers that nothing else reads.

    The idle sums are read at the end under a condition that is false. The assembler cannot know that it is.
    """
    due: dict[str, float] = defaultdict(float)
    lines: list[str] = []
    turn = 0
    for line in ptx.splitlines():
        if re.match(r"\s*ret;", line):
            for i in range(4 * sums):
                lines += [f"and.b32 %idle_sum, %idle{i}, %idle_zero;", "setp.ne.b32 %idle_read, %idle_sum, 0;"]
                lines += ["@%idle_read trap;"]
        lines.append(line)
        if found := MMA.search(line):
            kind, d, a, b, _ = found.groups()
            due[kind] += times[kind] - 1
            name = line[found.start() : line.index("{", found.start())].strip()
            while due[kind] >= 1:
                due[kind] -= 1
                turn = (turn + 1) % sums
                idle = ", ".join(f"%idle{4 * turn + i}" for i in range(len(d.split(","))))
                lines.append(f"{name} {{{idle}}}, {{{a}}}, {{{b}}}, {{{idle}}};")
    begin = [".reg .pred %idle_read;", f".reg .b32 %idle_zero, %idle_sum, %idle<{4 * sums}>;"]
    begin += ["mov.u32 %idle_zero, %ctaid.z;", *(f"mov.b32 %idle{i}, 0;" for i in range(4 * sums))]
    body = "\n".join(begin)
    return re.sub(r"(\.entry[^{]*\{)", lambda entry: f"{entry[0]}\n{body}", "\n".join(lines) + "\n", count=1)


class Machine:
    """A compiler of Triton's kernels in several ways in one process. Each way has its own kernels and its own cache on
    disk."""

    def __init__(self, packages: list[ModuleType], cache: Path) -> None:
        self.kernels = [x for package in packages for x in _kernels(package)]
        self.cache = cache
        self.ways: dict[str, dict[JITFunction, Any]] = {}

    @contextlib.contextmanager
    def compiling(self, name: str, times: dict[str, float] | None = None) -> Iterator[None]:
        """Compile for 8.0 and assemble for this GPU, throttled if there are `times`."""
        own = self.ways.setdefault(name, {k: defaultdict(k.create_binder) for k in self.kernels})
        major, minor = torch.cuda.get_device_capability()
        plain = CUDABackend.make_cubin

        def make_cubin(backend: Any, ptx: str, metadata: Any, options: Any, capability: int) -> Any:
            return plain(backend, throttled(ptx, times) if times else ptx, metadata, options, 10 * major + minor)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", make_cubin))
            driver = triton.runtime.driver.active
            stack.enter_context(mock.patch.object(driver, "get_current_target", return_value=AMPERE))
            stack.callback(setattr, triton.knobs.cache, "dir", triton.knobs.cache.dir)
            triton.knobs.cache.dir = str(self.cache / name)
            for kernel in self.kernels:
                stack.callback(setattr, kernel, "device_caches", kernel.device_caches)
                kernel.device_caches = own[kernel]
            yield


@contextlib.contextmanager
def throttling(times: dict[str, float]) -> Iterator[None]:
    """Compile the CUDA kernels of sm_80 as for a GeForce card, with the shared memory that one has, and throttle them.

    A kernel of 255 registers has no room for many idle sums; its warps are enough to keep two sums from waiting.
    """
    plain = nvrtc.compiled

    def compiled(*arguments: Any) -> bytes:
        ptx = plain(*arguments)
        return throttled(ptx.decode(), times, sums=2).encode() if MMA.search(ptx.decode()) else ptx

    with (
        mock.patch.object(nvrtc, "compiled", compiled),
        mock.patch("sagekernels.mma.architecture_of", return_value="compute_80"),
        mock.patch("sagekernels.mma.shared_memory_of", return_value=100 << 10),
    ):
        yield


def _kernels(package: ModuleType) -> list[JITFunction]:
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name in ("forward", "backward", "quantize")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    found = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    return [x for x in found.values() if x.fn.__name__.endswith("_kernel")]


class Candidate(NamedTuple):
    """One attention function: the package of its kernels, the way in which they are compiled, and the type of their
    sums."""

    name: str
    package: ModuleType | None
    way: Callable[[], Any]
    family: str = "portable"
    half: bool = False
    backend: str = "triton"

    def attend(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Compute attention with recipe `fine`, or FlashAttention-2 without a package. No document may be longer than
        the longest one of `shape`."""
        if self.package is not None:
            how = {"causal": shape.causal, "cu_seqlens": cu_seqlens, "recipe": "fine", "backend": self.backend}
            return self.package.sage_attention(q, k, v, **how)
        if cu_seqlens is None:
            return bench._sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, None, shape.causal)
        flat, longest = (x.flatten(0, 1) for x in (q, k, v)), max(shape.documents)
        window = (-1, 0 if shape.causal else -1)
        return varlen_attn(*flat, cu_seqlens, cu_seqlens, longest, longest, window_size=window).view(q.shape)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this candidate's kernels the ones that `attend` calls."""
        with contextlib.ExitStack() as stack:
            if self.package is not None:
                name = self.package.__name__
                stack.enter_context(mock.patch(f"{name}.launch.family", return_value=self.family))
                for module in ("forward", "backward", "launch") if self.package is sagekernels else ():
                    stack.enter_context(mock.patch(f"{name}.{module}.half_sums", return_value=self.half))
            stack.enter_context(self.way())
            yield

    def admitted(self, shape: Shape) -> Admission:
        """Compare the candidate with float64 on a small problem of the same kind."""
        with self.active():
            return admit(partial(self.attend, shape), shape, dtype=torch.bfloat16, device="cuda", limits=LIMITS["fine"])


RATES = r"""
extern "C" __global__ void rate(int turns, unsigned* out) {
  unsigned a[4], b[2], c[8][4];
  for (int i = 0; i < 4; i++) a[i] = threadIdx.x * 0x01010101u & MASK;
  for (int i = 0; i < 2; i++) b[i] = threadIdx.x * 0x01000100u & MASK;
  for (int i = 0; i < 8; i++) for (int j = 0; j < 4; j++) c[i][j] = 0;
  for (int t = 0; t < turns; t++)
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile(
      "mma.sync.aligned.INSTRUCTION SUMS,{%4,%5,%6,%7},{%8,%9},SUMS;"
      : "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  unsigned x = 0;
  for (int i = 0; i < 8; i++) for (int j = 0; j < 4; j++) x ^= c[i][j];
  if (x == 0x12345678u) out[threadIdx.x] = x;
}
"""
# By the type of the sums, this has the instruction, its operations, its sums, and a mask that makes small numbers of
# any operands.
INSTRUCTIONS = {
    "s32": ("m16n8k32.row.col.s32.s8.s8.s32", 2 * 16 * 8 * 32, "{%0,%1,%2,%3}", "0x0f0f0f0fu"),
    "f16": ("m16n8k16.row.col.f16.f16.f16.f16", 2 * 16 * 8 * 16, "{%0,%1}", "0x03ff03ffu"),
    "f32": ("m16n8k16.row.col.f32.bf16.bf16.f32", 2 * 16 * 8 * 16, "{%0,%1,%2,%3}", "0x3fff3fffu"),
}


def source_of(kind: str) -> str:
    """Return CUDA C++ that does nothing but one kind of mma.sync."""
    instruction, _, sums, mask = INSTRUCTIONS[kind]
    return RATES.replace("MASK", mask).replace("INSTRUCTION", instruction).replace("SUMS", sums)


def rates() -> dict[str, float]:
    """Measure the operations per second of mma.sync alone, by the type of the sums."""
    found: dict[str, float] = {}
    out = torch.zeros(1024, dtype=torch.int32, device="cuda")
    blocks, warps, turns = torch.cuda.get_device_properties(0).multi_processor_count, 16, 4096
    for kind, (_, operations, *_) in INSTRUCTIONS.items():
        kernel = torch.cuda._compile_kernel(source_of(kind), "rate")
        milliseconds = []
        for _ in range(5):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            kernel(grid=(blocks, 1, 1), block=(32 * warps, 1, 1), args=[turns, out])
            last.record()
            torch.cuda.synchronize()
            milliseconds.append(first.elapsed_time(last))
        found[kind] = blocks * warps * turns * 8 * operations / min(milliseconds) * 1e3
    return found


def gate(folder: Path) -> dict[str, float]:
    """Print and record the rates of mma.sync. Return how many times each is issued to be as slow as on a GeForce
    card."""
    measured, clock = rates(), 1e6 * torch.cuda.clock_rate()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    times = {}
    for kind, rate in measured.items():
        cost = 2 * SCORES * 128 / (rate / processors / clock)
        times[kind] = max(1.0, GEFORCE[kind] / cost)
        print(
            f"  mma.sync, sums in {kind}: {rate / 1e12:.0f} T/s, {cost:.0f} cycles a tile; throttled {times[kind]:.2f}x"
        )
    (folder / "rates.json").write_text(json.dumps({"rates": measured, "times": times}))
    return times


def shapes(mask: str, lengths: list[int], head_dim: int) -> list[Shape]:
    """List problems of hidden size 2048 and about 32K tokens with this mask. Packed documents have lengths of their
    own."""
    listed = [shape for shape in bench.shapes(lengths, [head_dim]) if shape.kv_heads == shape.heads]
    return [shape for shape in listed if mask == ("documents" if shape.documents else MASKS[shape.causal])]


def time_shape(candidates: list[Candidate], shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of forward and of backward, with candidates in turn, and the clock in MHz."""
    q, k, v, do = random_inputs(shape, dtype=torch.bfloat16, device="cuda")
    leaves, cu_seqlens = [x.requires_grad_() for x in (q, k, v)], shape.cu_seqlens("cuda")
    samples: dict[str, dict[str, list[float]]] = {one.name: defaultdict(list) for one in candidates}
    for turn in range(rounds + 1):
        for one in candidates:
            with one.active():
                for _ in range(2 if turn else 1):
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                    torch.cuda.synchronize()
                    torch.cuda._sleep(6_000_000)  # The host gets ahead of the GPU meanwhile.
                    events[0].record()
                    o = one.attend(shape, *leaves, cu_seqlens)
                    events[1].record()
                    torch.autograd.grad(o, leaves, do)
                    events[2].record()
                    torch.cuda.synchronize()
                    del o
                    if turn:  # The first call compiles.
                        samples[one.name]["forward"].append(events[0].elapsed_time(events[1]))
                        samples[one.name]["backward"].append(events[1].elapsed_time(events[2]))
                        samples[one.name]["clock"].append(float(torch.cuda.clock_rate()))
    return {name: {what: statistics.median(x) for what, x in found.items()} for name, found in samples.items()}


def cycles(milliseconds: float, clock: float, shape: Shape) -> float:
    """Return the cycles of one multiprocessor for a tile of SCORES."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    scores = bench.flops(shape) / (4 * shape.head_dim)
    return milliseconds * 1e3 * clock * processors / (scores / SCORES)


def row(name: str, found: dict[str, float], peer: dict[str, float], shape: Shape) -> str:
    """Return a line of the table: milliseconds, TFLOP/s, ratio to the peer, cycles per tile."""
    f, b = found["forward"], found["backward"]
    figures = [bench.flops(shape) * factor / ms / 1e9 for factor, ms in ((1, f), (2.5, b), (3.5, f + b))]
    ratios = [peer["forward"] / f, peer["backward"] / b, (peer["forward"] + peer["backward"]) / (f + b)]
    tile = [cycles(ms, found["clock"], shape) for ms in (f, b)]
    line = f"  {name:<22}{f:8.3f}{b:9.3f} ms" + "".join(f"{x:5.0f}" for x in figures) + " TFLOP/s  x"
    line += "".join(f" {x:.3f}" for x in ratios) + f"  {tile[0]:.0f} {tile[1]:.0f} cycles at {found['clock']:.0f} MHz"
    if "throttled" in name:
        there = [FA2_ON_GEFORCE[what] * shape.head_dim / 128 for what in ("forward", "backward")]
        modelled = [*(a / b for a, b in zip(there, tile, strict=True)), sum(there) / sum(tile)]
        line += "  of FA2 on a 4090" + "".join(f" {x:.2f}" for x in modelled)
    return line


def candidates(packages: list[ModuleType], times: dict[str, float]) -> list[Candidate]:
    """Return FlashAttention-2, each package's portable kernels in every way, and the CUDA kernels."""
    machine = Machine(packages, Path("/tmp/elsewhere"))
    plain, slow = partial(machine.compiling, "sm_80"), partial(machine.compiling, "geforce", times)
    found = [Candidate("FA2", None, contextlib.nullcontext)]
    for package in packages:
        name = "now" if package is sagekernels else "before"
        wgmma = next(rows for rows in package.launch.TABLE["forward"] if rows != "portable")
        found.append(Candidate(f"{name}, wgmma", package, contextlib.nullcontext, family=wgmma))
        found += [Candidate(name, package, plain), Candidate(f"{name}, throttled", package, slow)]
    found.append(Candidate("fp16 sums", sagekernels, plain, half=True))
    found.append(Candidate("fp16 sums, throttled", sagekernels, slow, half=True))
    found.append(Candidate("CUDA", sagekernels, contextlib.nullcontext, backend="mma"))
    way = partial(throttling, times)
    return [*found, Candidate("CUDA, throttled", sagekernels, way, half=True, backend="mma")]


def main() -> None:
    """Check the candidates, time them, print the table and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--before", help="package with the kernels of another commit, renamed, to time beside these")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too, as python -m sagekernels.tune does")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=[*MASKS, "documents"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--throttle-at", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="names of the candidates, as the table has them, to time beside FA2")
    parser.add_argument("--warm", help="NAME:HEAD_DIM: compile one candidate, for a process that times it later")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    packages = [sagekernels] + ([importlib.import_module(arguments.before)] if arguments.before else [])
    if arguments.warm:
        times = json.loads((arguments.out / "rates.json").read_text())["times"]
        name, _, head_dim = arguments.warm.rpartition(":")
        one = next(one for one in candidates(packages, times) if one.name == name)
        for mask in arguments.masks:
            shape = shapes(mask, arguments.lengths, int(head_dim))[0]
            time_shape([one], shape, 1)
            one.admitted(shape)
        return

    everyone = candidates(packages, gate(arguments.out))
    everyone = [one for one in everyone if one.name in ("FA2", *(arguments.only or [one.name]))]
    command = [sys.executable, *sys.argv, "--warm"]
    jobs = [f"{one.name}:{head_dim}" for one in everyone[1:] for head_dim in arguments.head_dims]
    for process in [subprocess.Popen([*command, job]) for job in jobs]:
        process.wait()
    if arguments.tiles:
        device = torch.device("cuda", torch.cuda.current_device())
        with next(one for one in everyone if one.name == "now").active():
            tune.tune(arguments.head_dims, lambda d: Shape(4, 4096, 4096, 2048 // d, 2048 // d, d), device, print)

    kept: dict[str, Any] = {}
    for head_dim, mask in itertools.product(arguments.head_dims, arguments.masks):
        timed, problems = [], shapes(mask, arguments.lengths, head_dim)
        for one in everyone:
            verdict = one.admitted(problems[0])
            errors = " ".join(f"{name} {e:.4f}" for name, e in verdict.errors.items())
            failure = "" if verdict.passed else f" NOT TIMED: {verdict.reason}"
            print(f"d {head_dim} {mask:<10}{one.name:<22} {errors}{failure}")
            timed += [one] if verdict.passed else []
        for shape in problems:
            slow = mask == "documents" or shape.n_q in arguments.throttle_at
            here = [one for one in timed if slow or "throttled" not in one.name]
            found = time_shape(here, shape, arguments.rounds if shape.n_q <= 32768 else 2)
            kept[str(shape)] = found
            print(shape, *(row(name, figures, found["FA2"], shape) for name, figures in found.items()), sep="\n")
            sys.stdout.flush()
            (arguments.out / "figures.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
