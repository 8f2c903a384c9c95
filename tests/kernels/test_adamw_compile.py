"""AdamW's update in one pass compiles without a GPU, and reads and writes 16 bytes at a time."""

import re

import pytest

from sagekernels import adamw
from sass import compiled


def ptx_of(architecture: int, eight_bits: bool, master: str) -> str:
    """Compile the kernel as it is launched for pieces whose memory and length are multiples of 16."""
    kernel = adamw._adamw_kernel
    constants = {"EIGHT_BITS": eight_bits, "MASTER": master, "ROWS": adamw.TILES[eight_bits][0], "BLOCK": adamw.BLOCK}
    types = {name: "*fp32" for name in kernel.arg_names if name.isupper()} | dict.fromkeys(
        adamw.Factors._fields, "fp32"
    )
    types |= dict.fromkeys(("WEIGHT", "REST"), "*fp32" if master == "nearest" else "*bf16")
    types |= dict.fromkeys(("AVERAGE", "SQUARES"), "*u8" if eight_bits else "*bf16")
    types |= {"first_part": "fp32", "second_part": "fp32", "first": "i64"}
    uneven = {name for name in kernel.arg_names if not types.get(name, "").startswith("*")} - {"count"}
    options = {"num_warps": adamw.TILES[eight_bits][1], "enable_fp_fusion": False}
    return compiled(kernel, architecture, constants, types, uneven, **options).asm["ptx"]


@pytest.mark.parametrize(("architecture", "eight_bits", "master"), [
    (80, True, "nearest"), (89, True, "chance"), (90, True, "nearest"), (100, False, "kahan"), (120, True, "kahan"),
])  # fmt: skip
def test_the_update_compiles(architecture, eight_bits, master):
    """Products and sums are not fused, but for codes. No value travels by shared memory but the maxima of blocks."""
    ptx = ptx_of(architecture, eight_bits, master)
    assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx and "div.full" not in ptx
    assert "v4.b32" in ptx or "v2.b32" in ptx
    assert bool(re.search(r"fma\.rn\.f32", ptx)) == eight_bits
    assert not re.search(r"\b(red|atom)\.", ptx)
