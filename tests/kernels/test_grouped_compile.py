"""The Triton kernels of mixtures of experts compile without a GPU, with the instructions of the hardware."""

import importlib
import itertools
import re

import pytest
import triton
from triton.compiler import CompiledKernel

import sass
from sagekernels import casts, grouped, grouped_casts, grouped_swiglu
from sagekernels import grouped_products as products
from sagekernels.int8_matmul import GROUP, TILES

# The package has a function of this name.
swiglu = importlib.import_module("sagekernels.swiglu")

SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 120: 99}  # A program may have so many KiB of shared memory.
INTEGERS = ("CHOICE", "SLOT", "ENDS", "TILES", "FIRST", "COUNTS", "BEFORE", "LOAD", "LARGEST")


def compiled(
    function: triton.JITFunction, architecture: int, constants: dict[str, object], types: dict[str, str], **options: int
) -> CompiledKernel:
    matrices = {name: "*bf16" for name in function.arg_names if name.isupper()}
    types = matrices | dict.fromkeys(INTEGERS, "*i32") | types
    return sass.compiled(function, architecture, constants, types, **options)


@pytest.mark.parametrize("architecture", [80])
def test_rows_are_planned_and_moved(architecture, tmp_path):
    """Copies have 16 bytes a thread, and counts stay in registers."""
    plan = {"TOP": 8, "PADDED": 128, "TOKENS": grouped.PLAN_TOKENS}
    made = compiled(grouped._place_kernel, architecture, plan, {"CHOICES": "*i64"}, num_warps=grouped.PLAN_WARPS)
    assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0
    compiled(grouped._sum_kernel, architecture, {"BLOCKS": grouped.PLAN_BLOCKS}, {}, num_warps=grouped.PLAN_WARPS)
    compiled(grouped._tiles_kernel, architecture, {"PADDED": 128, "TILE": grouped.TILE, "TABLE": 32}, {}, num_warps=1)
    for kernel in (grouped._gather_kernel, grouped._combine_kernel):
        made = compiled(kernel, architecture, {"TOP": 8, "COLUMNS": 2048}, {}, num_warps=grouped.WARPS)
        moved = [line for line in made.asm["ptx"].splitlines() if re.search(r"(ld|st)\.global\S*\.v", line)]
        assert len(moved) >= 2 and all("v4.b32" in line for line in moved)
        assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0


PRODUCTS = {(80, "int8"), (89, "e4m3"), (90, "int8"), (90, "e4m3"), (120, "int8")}


@pytest.mark.parametrize(("architecture", "number"), sorted(PRODUCTS))
def test_products_of_codes_use_tensor_cores(architecture, number, tmp_path):
    """On Hopper operands come by the copy engine, and two programs of the gradient's fit on a multiprocessor."""
    hopper = architecture == 90
    tile = TILES["sm_90" if hopper else "portable"]
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP": GROUP}
    constants |= {"DESCRIBED": hopper, "INT": number == "int8"}
    kind = {"int8": "i8", "e4m3": "fp8e4nv"}[number]
    types = {**dict.fromkeys(("A", "B"), f"*{kind}"), **dict.fromkeys(("A_SCALE", "B_SCALE"), "*fp32")}
    if hopper:
        types |= {"A": f"tensordesc<{kind}[{tile.block_m}, {tile.block_k}]>"}
        types |= {"B": f"tensordesc<{kind}[{tile.block_n}, {tile.block_k}]>"}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    for kernel, more in ((products._codes_product_kernel, {}), (products.codes_kernel, {"TILE": 128})):
        made = compiled(kernel, architecture, {**constants, **more}, types, **options)
        ptx = made.asm["ptx"]
        sums, inputs = ("s32", "s8") if number == "int8" else ("f32", "e4m3")
        name = rf"(wgmma\.mma_async|mma\.sync)\S*\.{sums}\.{inputs}\.{inputs}"
        assert ("wgmma" in re.search(name, ptx)[0]) == hopper
        assert ("cp.async.bulk.tensor" if hopper else "cp.async.cg") in ptx
        assert made.metadata.shared <= SHARED_MEMORY[architecture] * 1024
        assert not hopper or 2 * (made.metadata.shared + 1024) <= 228 * 1024
        assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0


@pytest.mark.parametrize(("architecture", "x"), [(80, "*bf16"), (120, "*fp32")])
def test_products_in_the_dtype_of_rows_compile(architecture, x, tmp_path):
    """Weights lie either way in 16 bits. fp32 has no tensor cores."""
    tile = products.WIDE_TILE if x != "*fp32" else products.WIDE_TILE._replace(block_k=16)
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP": GROUP}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernels = [
        (products._product_kernel, {"of_inner": 1}),
        (products._product_kernel, {"of_column": 1}),
        (products._weight_product_kernel, {}),
    ]
    for kernel, more in kernels[:1] if x == "*fp32" else kernels:
        made = compiled(
            kernel, architecture, {**constants, **more}, dict.fromkeys(("X", "WEIGHT", "OUT", "A", "B"), x), **options
        )
        assert ("mma.sync" in made.asm["ptx"]) == (x != "*fp32")
        assert made.metadata.shared <= SHARED_MEMORY[architecture] * 1024
        assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0


@pytest.mark.parametrize(("architecture", "number", "apart"), [(80, "int8", False), (90, "e4m3", True)])
def test_casts_compile(architecture, number, apart, tmp_path):
    """Tokens are gathered on the way, or experts' weights are read. Four rows are transposed at a time, as words."""
    shared = {"TOP": 8, "GATHERS": not apart, "APART": apart, "TILE": grouped.TILE}
    largest, rounds = ({name: how[name] for name in how if name.isupper()} for how in (casts.LARGEST, casts.ROUND))
    codes = {"int8": "*i8", "e4m3": "*fp8e4nv"}[number]
    types = {**dict.fromkeys(("CODES", "TURNED"), codes), **dict.fromkeys(("SCALE", "TURNED_SCALE"), "*fp32")}
    kernel = casts.largest_kernel
    made = compiled(
        kernel, architecture, {**shared, **largest, "NARROW": True}, types, num_warps=casts.LARGEST["num_warps"]
    )
    assert "max.s16" in made.asm["ptx"]
    constants = {**shared, **rounds, "NUMBER": number}
    kernel, options = grouped_casts._grouped_round_kernel, {"enable_fp_fusion": casts.FUSION}
    made = compiled(kernel, architecture, constants, types, num_warps=casts.ROUND["num_warps"], **options)
    assert "ld.shared" in made.asm["ptx"] and "ld.shared.b8" not in made.asm["ptx"]
    assert number != "int8" or "fma" not in made.asm["ptx"]
    assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0
    constants = {"TOP": 8, "GATHERS": True, "COLUMNS": 2048, "NUMBER": number}
    kernel = grouped_casts._grouped_round_rows_kernel
    compiled(kernel, architecture, constants, types, num_warps=grouped_casts.ROW_WARPS, **options)


@pytest.mark.parametrize("architecture", [90])
def test_weighted_swiglu_compiles(architecture, tmp_path):
    """Every load and store of a matrix has 16 bytes a thread. There are no atomics of floats."""
    constants = {name: getattr(swiglu, name) for name in ("ROWS", "COLUMNS", "STAGES", "TILE")}
    constants |= {"UP": None, "MEASURED": True, "NARROW": True}
    types = dict.fromkeys(("WEIGHTS", "PARTIAL", "OF_WEIGHTS", "OF_BIAS"), "*fp32")
    both = swiglu.swiglu_kernel, swiglu.swiglu_gradients_kernel
    for kernel, gate in itertools.product(both, swiglu.GATES.values()):
        none = {} if gate.limit else {"BIAS": None, "OF_BIAS": None}
        more = constants | {name: None for name in none if name in kernel.arg_names}
        more |= {name.upper(): number for name, number in gate._asdict().items()}
        made = compiled(kernel, architecture, more, types, num_warps=swiglu.WARPS)
        ptx = made.asm["ptx"]
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx) or "cp.async.cg" in ptx
        assert "st.global.v4.b32" in ptx and not re.search(r"(red|atom)\S*\.f32", ptx)
        assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0
    compiled(grouped_swiglu._sum_parts_kernel, architecture, {"CHOICES": 256}, types, num_warps=4)
    compiled(grouped_swiglu._sum_tiles_kernel, architecture, {"COLUMNS": 256}, types, num_warps=4)
