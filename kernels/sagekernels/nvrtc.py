"""Compile, cache and launch the CUDA C++ kernels of this package at run time by NVRTC, which comes with torch's CUDA
wheels.

    kernel = load("mma_forward.cu", "forward", {"HEAD_DIM": 128}, "sm_80")    # cached in the process and on disk
    kernel.launch((132, 1, 1), (384, 1, 1), shared_bytes, tensor_map(x, (64, 128)), y, 5, 0.5)

Kernels are `extern "C"`, for the architecture that the caller names, without headers except *.cuh files of this
package. An argument's Python type is its C type: Tensor -> pointer, None -> null pointer, int -> int, float -> float,
TensorMap -> const __grid_constant__ TensorMap (any struct of 128 bytes aligned to 64).
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # The number is a CUfunction_attribute.

# These are values of CUtensorMapDataType. A copy moves bytes, but the fill outside of the tensor is a zero of the type.
MAP_TYPES = {torch.int8: 0, torch.uint8: 0, torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTION_256 = 3


class CompilationError(RuntimeError):
    """NVRTC was not found, or it does not compile a source file."""


def _libraries() -> list[str]:
    """List the paths where libnvrtc may lie, torch's own major version of CUDA first."""
    majors = sorted({"12", "13"}, key=lambda major: not (torch.version.cuda or "").startswith(major))
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (nvidia.submodule_search_locations or [] if nvidia else [])]
    found = []
    for major in majors:
        name = f"libnvrtc.so.{major}"
        found += [root / folder / "lib" / name for root in roots for folder in (f"cu{major}", "cuda_nvrtc")]
        found += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / name]
        found = [str(path) for path in found if isinstance(path, str) or path.exists()] + [name]
    return found


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    tried = _libraries()
    for path in tried:
        try:
            if os.sep in path:  # NVRTC asks for its other half by name alone, so that one is loaded first.
                for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CompilationError(
        f"NVRTC was not found (tried {', '.join(tried)}); it comes with torch's CUDA wheels: install them, set "
        "CUDA_HOME or take the backend 'triton'"
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no NVIDIA driver: {error}") from error


def available() -> bool:
    """Return whether kernels can be compiled here; running them needs a GPU as well."""
    try:
        _nvrtc()
    except CompilationError:
        return False
    return True


def _call(function: str, *arguments) -> None:
    """Call a function of the driver that returns a CUresult, and raise RuntimeError unless it succeeds."""
    code = getattr(_driver(), function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'unknown error').decode()} ({code})")


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _text(what: str, program: ctypes.c_void_p) -> bytes:
    """Read the log or the binary of a program: first its size, then its bytes."""
    size = ctypes.c_size_t()
    getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(_nvrtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


_begun: dict[tuple[str, tuple[tuple[str, int | str], ...], str], Future[bytes]] = {}
"""The programs that threads compile or have compiled, until they are asked for."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # A process that ends waits for the threads of a pool. With daemon threads it ended by SIGSEGV in NVRTC four times
    # of four.
    return ThreadPoolExecutor(4, "nvrtc")


def begin(source_file: str, defines: Mapping[str, int | str], architecture: str) -> None:
    """Begin `compiled` in a thread. The call with the same arguments waits for it, and raises what it raised. NVRTC
    runs beside Python, for example beside imports."""
    name = source_file, tuple(sorted(defines.items())), architecture
    if name not in _begun:
        _begun[name] = _threads().submit(_compiled, source_file, defines, architecture)


def compiled(source_file: str, defines: Mapping[str, int | str], architecture: str) -> bytes:
    """Return the cubin of a source file of this package, from the disk or from NVRTC. For a virtual architecture such
    as compute_80 it is PTX, which the driver assembles for the GPU at hand."""
    begun = _begun.pop((source_file, tuple(sorted(defines.items())), architecture), None)
    return begun.result() if begun else _compiled(source_file, defines, architecture)


def _compiled(source_file: str, defines: Mapping[str, int | str], architecture: str) -> bytes:
    source = (HERE / source_file).read_bytes()
    # NVRTC 13.0 takes a lambda with an `auto` parameter for a function of the host unless told otherwise.
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space"]
    options += [f"--define-macro={name}={value}" for name, value in sorted(defines.items())]
    headers = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cuh")))
    key = hashlib.sha256(repr((source, headers, options, _version())).encode()).hexdigest()
    folder = Path(os.environ.get("SAGEKERNELS_CACHE", Path.home() / ".cache" / "sagekernels"))
    kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
    cached = folder / f"{Path(source_file).stem}-{key[:32]}.{kind.lower()}"
    if cached.exists():
        return cached.read_bytes()
    program, lib = ctypes.c_void_p(), _nvrtc()
    options.append(f"--include-path={HERE}")
    lib.nvrtcCreateProgram(ctypes.byref(program), source, source_file.encode(), 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        code = lib.nvrtcCompileProgram(program, len(options), arguments)
        if code:
            log = _text("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise CompilationError(
                f"NVRTC {_version()} does not compile {source_file} with {options}; install newer CUDA wheels or take "
                f"the backend 'triton':\n{log}"
            )
        binary = _text(kind, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(binary)
        os.replace(file.name, cached)  # Other processes see the whole file or nothing.
    except OSError:
        pass  # The cache cannot be written, so the next process compiles again.
    return binary


class TensorMap:
    """The memory of a CUtensorMap: 128 bytes, aligned to 64."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(192)
        self.address = -(-ctypes.addressof(self._buffer) // 64) * 64


def tensor_map(x: Tensor, box: Sequence[int], swizzle: int = 128) -> TensorMap:
    """Describe x for copies of `box` elements by the TMA unit. `box` has one extent per dimension of x, in the order of
    x.

    The last dimension of x is contiguous. The other strides and the address are multiples of 16 bytes. The kernel gives
    coordinates with the last dimension first. Outside of x zeros are read and nothing is written.
    """
    return _tensor_map(x.data_ptr(), x.shape, x.stride(), x.dtype, tuple(box), swizzle)


@functools.lru_cache(4096)  # A step of training comes back to the same addresses: 8 maps per layer, a KiB each.
def _tensor_map(
    address: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...], swizzle: int
) -> TensorMap:
    size = dtype.itemsize
    rank = len(shape)
    steps_in_bytes = [s * size if extent > 1 else 16 for s, extent in zip(stride, shape, strict=True)][-2::-1]
    if stride[-1] != 1 or address % 16 or any(s % 16 or s == 0 for s in steps_in_bytes):
        raise ValueError(f"no tensor map of strides {stride} at address {address:#x}")
    dims = (ctypes.c_uint64 * rank)(*shape[::-1])
    strides = (ctypes.c_uint64 * rank)(*steps_in_bytes)
    extents = (ctypes.c_uint32 * rank)(*box[::-1])
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    result = TensorMap()
    _call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(result.address), MAP_TYPES[dtype], rank,
        ctypes.c_void_p(address), dims, strides, extents, steps, 0, MAP_SWIZZLES[swizzle], L2_PROMOTION_256, 0,
    )  # fmt: skip
    return result


def mappable(x: Tensor) -> Tensor:
    """Return x [B, N, H, D] in 16 bits, copied if tensor_map cannot describe its strides."""
    strides = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    odd = x.stride(3) != 1 or x.data_ptr() % 16 or any(s % 8 or s == 0 for s in strides)
    return x.clone(memory_format=torch.contiguous_format) if odd else x


class Kernel:
    """One kernel of one compiled source. It is loaded on each GPU at its first launch there."""

    def __init__(self, source_file: str, name: str, defines: Mapping[str, int | str], architecture: str) -> None:
        self.cubin, self.name = compiled(source_file, defines, architecture), name
        self.functions: dict[int, ctypes.c_void_p] = {}

    def _function(self, device: int, shared_bytes: int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:  # A thread of autograd may not have called CUDA yet.
            _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            _call("cuCtxSetCurrent", context)
        if device not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _call("cuModuleLoadData", ctypes.byref(module), self.cubin)
            _call("cuModuleGetFunction", ctypes.byref(function), module, self.name.encode())
            _call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            self.functions[device] = function
        return self.functions[device]

    def launch(self, grid: Sequence[int], block: Sequence[int], shared_bytes: int, *arguments) -> None:
        """Launch on torch's current stream and device. Every launch of a kernel asks for the same shared_bytes of
        dynamic memory."""
        values = (ctypes.c_uint64 * len(arguments))()
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*range(first, first + ctypes.sizeof(values), 8))
        for i, x in enumerate(arguments):
            if isinstance(x, int):
                values[i] = x  # The low half of a negative number is the int32 too.
            elif isinstance(x, TensorMap):
                pointers[i] = x.address
            elif isinstance(x, float):
                ctypes.c_float.from_buffer(values, 8 * i).value = x
            elif x is not None:
                values[i] = x.data_ptr()
        device = torch.cuda.current_device()
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
        function = self._function(device, shared_bytes)
        sizes = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        _call("cuLaunchKernel", function, *sizes, shared_bytes, stream, pointers, None)


@functools.cache
def _load(source_file: str, name: str, defines: tuple, architecture: str) -> Kernel:
    return Kernel(source_file, name, dict(defines), architecture)


def load(source_file: str, name: str, defines: Mapping[str, int | str], architecture: str) -> Kernel:
    """Return the kernel `name` of kernels/sagekernels/<source_file>, compiled with these macros for NVRTC's name of an
    architecture, for example sm_90a."""
    return _load(source_file, name, tuple(sorted(defines.items())), architecture)
