"""FP4's Triton kernels compile on a machine without a GPU, with native products where a GPU has them. They are not
timed."""

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sagekernels.fp4.kernels import _fp4_forward_kernel, _quantize_fp4_kernel

BYTES = ("Q4", "Q_SCALE", "K4", "K_SCALE", "V4", "V_SCALE", "CODES", "SCALE")
SHARED_MEMORY = {100: 227, 120: 99}  # A program may have so many KiB of shared memory.


def type_of(name: str) -> str:
    if name in BYTES:
        return "*u8"
    if name in ("STARTS", "ENDS"):
        return "*i32"
    if name in ("K", "O"):
        return "*bf16"
    return "fp32" if name in ("scale", "largest_p") else "*fp32" if name.isupper() else "i32"


def compiled(function, architecture: int, constants: dict[str, object]):
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")
    }
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    target = GPUTarget("cuda", architecture, 32)
    return compile(ASTSource(function, signature, fixed, aligned), target=target, options=options)


def products(ptx: str) -> set[str]:
    """Return the kinds of matrix instructions."""
    return set(re.findall(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*?\.(bf16\.bf16|kind::\w+)", ptx))


@pytest.mark.parametrize(("architecture", "head_dim", "e8m0", "block_m", "expected"), [
    # This Triton has no native products for this GPU, and makes the code that it makes for 8.0.
    (120, 256, True, 64, ("mma.sync", "bf16.bf16")),
    (100, 128, False, 128, ("tcgen05.mma", "kind::mxf4nvf4")),
    (100, 64, True, 128, ("tcgen05.mma", "kind::mxf4")),
    (120, 128, False, 64, ("mma.sync", "kind::mxf4nvf4")),
    (120, 64, True, 64, ("mma.sync", "kind::mxf4nvf4")),
])  # fmt: skip
def test_attention_compiles(architecture, head_dim, e8m0, block_m, expected):
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "PADDED_D": head_dim,
        "BLOCK_M": block_m,
        "TILE": 64,
        "GROUP": 32 if e8m0 else 16,
        "E8M0": e8m0,
        "IS_CAUSAL": True,
        "PACKED": True,
        "SMOOTH_Q": True,
        "NATIVE": expected[1].startswith("kind"),
    }
    made = compiled(_fp4_forward_kernel, architecture, constants)
    assert products(made.asm["ptx"]) == {expected}
    assert made.metadata.shared <= SHARED_MEMORY[architecture] * 1024
    assert "cubin" in made.asm


@pytest.mark.parametrize("e8m0", [False, True])
def test_the_quantizer_fuses_nothing(e8m0):
    """A fused multiply-add in the rounding of a scale would change the scale."""
    made = compiled(_quantize_fp4_kernel, 90, {"TILE": 64, "GROUP": 32 if e8m0 else 16, "E8M0": e8m0})
    assert "fma" not in made.asm["ptx"] and "mul.rn.f32" in made.asm["ptx"]
