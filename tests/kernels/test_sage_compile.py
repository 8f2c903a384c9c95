"""The portable Triton kernels compile for every family of GPUs, to the expected code, on a machine without a GPU."""

import contextlib
import re

import pytest
import torch
import triton

from sagekernels.backward import _dkdv_kernel, _dq_kernel
from sagekernels.forward import _forward_kernel
from sagekernels.launch import TABLE, check_int8, family, launch_tiles
from sass import compiled, resources

KERNELS = {"forward": _forward_kernel, "dkdv": _dkdv_kernel, "dq": _dq_kernel}
INT8 = ("Q8", "K8", "V8T", "Q8T", "K8T", "DO8T")
SIXTEEN_BITS = ("V", "K", "O", "DO", "DK", "DV", "DQ")
SHARED_MEMORY = 99  # A program may have so many KiB of shared memory.
# A thread keeps up to so many bytes of registers in memory, over all three loops of a kernel: the measured value, and
# some reserve.
SPILLED = {"forward": 64, "dkdv": 560, "dq": 96}


def type_of(name: str, half_sums: bool) -> str:
    if name in INT8:
        return "*i8"
    if name in ("V", "DO") and half_sums:
        return "*fp16"
    if name in SIXTEEN_BITS:
        return "*bf16"
    if name in ("STARTS", "ENDS"):
        return "*i32"
    return "fp32" if name == "scale" else "*fp32" if name.isupper() else "i32"


# Triton makes the same code for 8.0, 8.6 and 8.9. All portable tiles fit the GPU with the least shared memory. Code for
# 9.0 is compiled, and run, by tests/gpu/test_sage_gpu.py.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("architecture", "head_dim", "half_sums"), [(80, 128, False), (89, 64, True), (120, 128, True)]
)
def test_compiles(kernel, architecture, head_dim, half_sums, tmp_path, monkeypatch):
    assert family(divmod(architecture, 10)) == "portable"
    monkeypatch.setattr("sagekernels.launch.family", lambda capability: "portable")
    tiles = launch_tiles(kernel, torch.device("cpu"), head_dim)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "IS_CAUSAL": True,
        "PACKED": True,
        "HALF_SUMS": half_sums,
        "K_MEAN": None,
    }
    if kernel == "forward":
        constants.update(INT8_PV=False, V8T=None, V_SCALE=None)
    else:
        constants.update(PER_TILE=False, INT8_GRADIENTS=True, Q16=None, K16=None)
    function = KERNELS[kernel]
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: type_of(name, half_sums) for name in names}
    uneven = {name for name in names if types[name] == "fp32"}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.max_registers}
    made = compiled(function, architecture, constants, types, uneven, **options)
    ptx = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_MEMORY * 1024
    registers, stack = resources(made.asm["cubin"], tmp_path)
    assert registers * tiles.num_warps * 32 <= 65536
    assert stack <= SPILLED[kernel] * (1.25 if half_sums else 1)  # Sums in float16 have a factor of each row.
    # Portable tiles were chosen so that warps share no row, and no maximum crosses warps.
    layouts = set(re.findall(r"warpsPerCTA = \[(\d+), (\d+)\], instrShape", made.asm["ttgir"]))
    assert layouts == {(str(tiles.num_warps), "1")}
    assert ".s8.s8" in ptx
    sums = set(re.findall(r"mma\.\S*\.(f16|f32)\.f16\.f16", ptx))
    assert sums == ({"f16"} if half_sums else set())
    if kernel != "forward":  # The forward divides once, at its end.
        assert not re.search(r"div\.\w+\.f32", ptx) and "rcp.approx" in ptx


def test_old_gpus_are_refused():
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\) or newer, got 7\.5"):
        family((7, 5))


@pytest.mark.parametrize(("capability", "version", "attention", "linear"), [
    ((10, 3), "3.9.0", "7 % of the speed of bf16; use attention.backend flash or sdpa", "linear.precision bf16 or fp8"),
    (
        (10, 0),
        "3.7.1",
        None,
        r"need Triton 3\.8 or newer, .* this is 3\.7\.1; install it, or use linear.precision bf16",
    ),
    ((10, 0), "3.10.0+git1", None, None),
    ((12, 0), "3.7.1", None, None),
])  # fmt: skip
def test_gpus_whose_int8_is_slow_are_refused(capability, version, attention, linear, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    for says, by_tensor_memory in ((attention, False), (linear, True)):
        with pytest.raises(NotImplementedError, match=says) if says else contextlib.nullcontext():
            check_int8(capability, by_tensor_memory=by_tensor_memory)


@pytest.mark.parametrize("held", TABLE["forward"]["portable"])
def test_tiles_of_a_scale(held):
    for kernel in TABLE:
        tiles = launch_tiles(kernel, torch.device("cpu"), held, exact=True)
        assert (tiles.block_m, tiles.block_n) == (64, 64)
