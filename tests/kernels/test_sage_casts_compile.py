"""The Triton kernels around linear layers compile on a machine without a GPU, with the instructions of the hardware."""

import importlib
import re

import pytest
import torch

from sagekernels import add_norm, hopper_projection
from sagekernels.casts import (
    FUSION,
    LARGEST,
    LARGEST_TILE,
    ROUND,
    _round_both_kernel,
    largest_kernel,
)
from sass import compiled, resources

# The package has functions of these modules' names.
qk_norm_rope, swiglu = (importlib.import_module(f"sagekernels.{name}") for name in ("qk_norm_rope", "swiglu"))

POINTERS = {"LARGEST": "*i32", **dict.fromkeys(("SCALE", "TURNED_SCALE", "COS", "SIN", "PARTIAL", "SUMS"), "*fp32")}
NUMBERS = {"eps": "fp32", "scale": "fp32"}
MATRICES = ("X", "GRAD", "GATE", "UP", "OUT", "Q", "K", "Q_GAIN", "K_GAIN", "Q_OUT", "K_OUT", "OF_Q", "OF_K", "OF_V")
NORM = "X", "Y", "GAIN", "STREAM", "OUT", "OF_STREAM", "OF_NORMED"
CODES = {"int8": "*i8", "e4m3": "*fp8e4nv"}


PIECE, ROUND_TILE = ({name: how[name] for name in how if name.isupper()} for how in (LARGEST, ROUND))


def ptx_of(
    function, architecture: int, num_warps: int, constants: dict[str, object], x: str = "*bf16", **options: object
) -> str:
    codes = dict.fromkeys(("CODES", "TURNED"), CODES[constants.get("NUMBER", "int8")])
    types = {**dict.fromkeys(MATRICES, x), **POINTERS, **codes, **NUMBERS}
    uneven, options["num_warps"] = (*NUMBERS, "across"), num_warps
    return compiled(function, architecture, constants, types, uneven, **options).asm["ptx"]


@pytest.mark.parametrize("architecture", [89, 90, 100])
@pytest.mark.parametrize(("x", "instruction"), [("*bf16", "max.s16"), ("*fp32", "max.s32")])
def test_the_largest_magnitudes_compile(architecture, x, instruction):
    """bfloat16 is compared as 16 bits, which ptxas pairs."""
    constants = {**PIECE, "TILE": LARGEST_TILE, "NARROW": x == "*bf16", "TOP": 1, "GATHERS": False, "APART": False}
    constants |= {"CHOICE": None, "TILES": None}
    assert instruction in ptx_of(largest_kernel, architecture, LARGEST["num_warps"], constants, x)


@pytest.mark.parametrize(("architecture", "number", "instruction"), [
    (89, "e4m3", "st.global"),  # The conversion takes several instructions.
    (90, "e4m3", "cvt.rn.satfinite.e4m3x2.f32"),
    (100, "e4m3", "cvt.rn.satfinite.e4m3x2.f32"),
    (80, "int8", "add"),
])  # fmt: skip
def test_rounding_compiles(architecture, number, instruction):
    constants = {**ROUND_TILE, "NUMBER": number}
    assert instruction in ptx_of(_round_both_kernel, architecture, ROUND["num_warps"], constants)


def test_int8_rounds_the_product_before_it_rounds_to_a_code():
    """A product and an addition as one instruction would round once, where torch rounds twice."""
    constants = {**ROUND_TILE, "NUMBER": "int8"}
    assert "fma" not in ptx_of(_round_both_kernel, 90, ROUND["num_warps"], constants, enable_fp_fusion=FUSION)


@pytest.mark.parametrize("x", ["*bf16", "*fp32"])
def test_codes_are_transposed_as_words(x):
    """Four rows are transposed at a time, because shared memory is slow at single bytes."""
    constants = {**ROUND_TILE, "NUMBER": "e4m3"}
    ptx = ptx_of(_round_both_kernel, 90, ROUND["num_warps"], constants, x)
    assert "ld.shared" in ptx
    assert "ld.shared.b8" not in ptx


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_swiglu_compiles(architecture):
    """Every load and store has 16 bytes a thread."""
    constants = {name: getattr(swiglu, name) for name in ("ROWS", "COLUMNS", "STAGES", "TILE")}
    constants |= {"NARROW": True, "MEASURED": True, **dict.fromkeys(("BIAS", "WEIGHTS", "CHOICE", "TILES"))}
    constants |= {name.upper(): number for name, number in swiglu.GATES["swiglu"]._asdict().items()}
    parts = dict.fromkeys(("PARTIAL", "OF_BIAS"))
    for kernel, more in ((swiglu.swiglu_kernel, {}), (swiglu.swiglu_gradients_kernel, parts)):
        ptx = ptx_of(kernel, architecture, swiglu.WARPS, {**constants, **more})
        assert ptx.count("ex2.approx") == swiglu.ROWS * swiglu.COLUMNS // (32 * swiglu.WARPS)
        moved = [line for line in ptx.splitlines() if "ld.global" in line or "st.global" in line]
        assert moved and all("v4.b32" in line for line in moved)


@pytest.mark.parametrize(("columns", "x", "architecture"), [
    (2048, "*bf16", 80), (2048, "*bf16", 90), (4096, "*bf16", 90), (8192, "*bf16", 89), (8192, "*bf16", 120),
    (512, "*fp32", 90), (4096, "*fp32", 89), (16384, "*fp32", 120),
])  # fmt: skip
def test_addition_and_norm_compile(columns, x, architecture, tmp_path):
    """Loads of the next row are on their way, nothing spills, and a multiprocessor holds two programs of 4,096 columns.
    Rows of 16,384 columns in float32 are too long for shared memory, and are loaded without it."""
    like = torch.empty(1, columns, dtype=torch.bfloat16 if x == "*bf16" else torch.float32)
    types = {**dict.fromkeys(NORM, x), **POINTERS, **NUMBERS}
    for kernel, how in (
        (add_norm.add_norm_kernel, add_norm.forward_how(like)),
        (add_norm.add_norm_gradients_kernel, add_norm.backward_how(like)),
    ):
        warps, held = how.pop("num_warps"), columns < 16384
        made = compiled(kernel, architecture, how, types, tuple(NUMBERS), num_warps=warps)
        assert ("cp.async" in made.asm["ptx"]) == held and ".v4.b32" in made.asm["ptx"]
        assert made.metadata.shared <= 99 << 10
        registers, spilled = resources(made.asm["cubin"], tmp_path)
        assert spilled == 0 or not held
        assert columns > 4096 or 2 * 32 * warps * registers <= 65536


@pytest.mark.parametrize(("heads", "head_dim", "x", "architecture"), [
    ((16, 4), 128, "*bf16", 80), ((16, 4), 128, "*bf16", 100), ((12, 1), 80, "*bf16", 80), ((32, 8), 64, "*fp32", 90),
])  # fmt: skip
def test_qk_norm_with_rotary_embedding_compiles(heads, head_dim, x, architecture):
    """q's stores have 16 bytes a thread, and there are no atomics. Blocks follow from heads, code from the
    architecture. tests/gpu/test_qk_norm_rope_gpu.py compiles all of them for the GPU at hand."""
    query, key = (count * head_dim for count in heads)
    forward = qk_norm_rope._blocks(qk_norm_rope.FORWARD_ELEMENTS, query, key, head_dim)
    ptx = ptx_of(qk_norm_rope._qk_norm_rope_kernel, architecture, qk_norm_rope.FORWARD_WARPS, forward, x)
    assert "rsqrt.approx" in ptx and "st.global.v4.b32" in ptx
    backward = qk_norm_rope._blocks(qk_norm_rope.BACKWARD_ELEMENTS, query, key, head_dim)
    backward = {**backward, "TOKENS": qk_norm_rope.BACKWARD_TOKENS}
    kernel = qk_norm_rope._qk_norm_rope_gradients_kernel
    ptx = ptx_of(kernel, architecture, qk_norm_rope.BACKWARD_WARPS, backward, x)
    assert "rsqrt.approx" in ptx and "atom" not in ptx and "red.global" not in ptx
    tile = {"ROWS": qk_norm_rope.SUM_ROWS, "COLUMNS": qk_norm_rope.SUM_COLUMNS}
    assert "st.global" in ptx_of(qk_norm_rope._sum_rows_kernel, architecture, qk_norm_rope.SUM_WARPS, tile, x)


@pytest.mark.parametrize(("heads", "head_dim"), [((16, 4), 128), ((32, 8), 64)])
def test_the_gradient_of_a_projection_compiles(heads, head_dim):
    """The loads of the next head are on their way, and there are no atomics."""
    constants = {"Q_HEADS": heads[0], "K_HEADS": heads[1], "HALF": head_dim // 2, "TILE": 64}
    constants["STAGES"] = hopper_projection.STAGES
    ptx = ptx_of(hopper_projection._projection_gradients_kernel, 90, hopper_projection.WARPS, constants)
    assert "cp.async" in ptx and "rsqrt.approx" in ptx and not re.search(r"\b(atom|red)\.", ptx)
