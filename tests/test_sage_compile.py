"""The portable Triton kernels compile for every family of GPUs, and fit its shared memory, on a machine without one."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sagekernels.backward import _dkdv_kernel, _dq_kernel
from sagekernels.forward import _forward_kernel
from sagekernels.launch import TABLE, family, launch_tiles

KERNELS = {"forward": _forward_kernel, "dkdv": _dkdv_kernel, "dq": _dq_kernel}
INT8 = ("Q8", "K8", "V8T", "Q8T", "K8T", "DO8T")
SIXTEEN_BITS = ("V", "K", "O", "DO", "DK", "DV", "DQ")
SHARED_MEMORY = {80: 163, 90: 227, 120: 99}  # KiB a program may have


def type_of(name: str, int8_scores: bool) -> str:
    if name in ("Q8", "K8") and not int8_scores:
        return "*bf16"
    if name in INT8:
        return "*i8"
    if name in SIXTEEN_BITS:
        return "*bf16"
    if name in ("STARTS", "ENDS"):
        return "*i32"
    return "fp32" if name == "scale" else "*fp32" if name.isupper() else "i32"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("architecture", "head_dim", "int8_scores"),
    [(80, 64, True), (90, 64, True), (120, 128, True), (90, 128, False), (120, 128, False)],
)
def test_compiles(kernel, architecture, head_dim, int8_scores):
    tiles = TABLE[kernel][family(divmod(architecture, 10))][head_dim]
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "IS_CAUSAL": True,
        "PACKED": True,
        "SMOOTH_Q": False,
        "Q_MEAN": None,
        "K_MEAN": None,
    }
    if kernel == "forward":
        constants.update(INT8_PV=False, V8T=None, V_SCALE=None)
    else:
        constants.update(PER_TILE=False, INT8_GRADIENTS=True, Q16=None, K16=None)
    function = KERNELS[kernel]
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else type_of(name, int8_scores) for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")
    }
    compiled = compile(
        ASTSource(function, signature, fixed, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.max_registers},
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture] * 1024
    # INT8 matrix instructions are there, but where "gradients" has none in the forward
    assert (".s8.s8" in compiled.asm["ptx"]) == (int8_scores or kernel != "forward")


def test_old_gpus_are_refused():
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\) or newer, got 7\.5"):
        family((7, 5))


def test_tiles_of_a_scale():
    tiles = launch_tiles("forward", torch.device("cpu"), 256, exact=True)
    assert (tiles.block_m, tiles.block_n) == (64, 64)
