"""The product of INT8 matrices compiles on a machine without a GPU, with the instructions of the hardware."""

import re

import pytest
from triton.compiler import CompiledKernel

import sass
from sagekernels.int8_matmul import GROUP, TILES, ProductTile, codes_kernel

SHARED_MEMORY = {80: 163, 89: 99, 100: 227}  # A program may have so many KiB of shared memory.


def compiled(tile: ProductTile, architecture: int, out: str = "*bf16") -> CompiledKernel:
    """Compile the kernel as it is launched for sizes that are multiples of 16. ptxas takes it."""
    described = architecture == 90
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {"GROUP": GROUP, "DESCRIBED": described, "INT": True, "FIRST": None, "TILE": 0}
    types = {**dict.fromkeys(("A", "B"), "*i8"), **dict.fromkeys(("A_SCALE", "B_SCALE"), "*fp32"), "OUT": out}
    if described:
        types["A"] = f"tensordesc<i8[{tile.block_m}, {tile.block_k}]>"
        types["B"] = f"tensordesc<i8[{tile.block_n}, {tile.block_k}]>"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return sass.compiled(codes_kernel, architecture, constants, types, **options)


@pytest.mark.parametrize("out", ["*bf16", "*fp16", "*fp32"])
def test_hopper_multiplies_by_warp_groups_without_spills(out, tmp_path):
    """Operands come by the copy engine, and two programs fit on a multiprocessor."""
    made = compiled(TILES["sm_90"], 90, out)
    ptx = made.asm["ptx"]
    assert re.search(r"wgmma\.mma_async\S*\.s32\.s8\.s8", ptx)
    assert "cp.async.bulk.tensor" in ptx and "ld.global.b128" not in ptx
    assert 2 * (made.metadata.shared + 1024) <= 228 * 1024
    assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_others_multiply_by_warps(architecture, tmp_path):
    made = compiled(TILES["portable"], architecture)
    assert re.search(r"mma\.sync\S*\.s32\.s8\.s8", made.asm["ptx"])
    assert "cp.async.cg" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_MEMORY[architecture] * 1024
    assert sass.resources(made.asm["cubin"], tmp_path)[1] == 0
