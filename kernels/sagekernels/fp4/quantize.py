"""FP4 quantizers (SageAttention3, arXiv 2505.11594) in torch. The kernels in kernels.py compute the same, bit for bit.

phi(x): groups of 16 (NVFP4) or 32 (MXFP4) numbers along the contracted axis share one scale s. A number becomes the
nearest e2m1 value of x / s, ties to the even code, at most 6. Every s times e2m1 is exact in float32 and bfloat16, and
so are the sums within a group. A float32 matmul of the dequantized operands is therefore what a tensor core would
compute, up to the order of its sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..quantize import TILE

# Codes 0 to 7 stand for these values; bit 3 of a code is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0


class Format(NamedTuple):
    """The way in which a group of numbers shares a scale."""

    group: int
    """The numbers that share a scale, consecutive along the contracted axis. TILE is a multiple of it."""
    e8m0: bool
    """Whether scales are powers of two from 2^-127. Otherwise they are e4m3: 4 significant bits, 2^-9 to 448."""
    largest: float
    """The value to which two-level P scales the largest P of a row of a tile. It is the largest number of the format.
    Where scales have range enough (e8m0), it is the largest value under a scale of 1."""


FORMATS = {
    "nvfp4": Format(group=16, e8m0=False, largest=E4M3_MAX * E2M1_MAX),
    "mxfp4": Format(group=32, e8m0=True, largest=E2M1_MAX),
}


class Fp4(NamedTuple):
    """Codes uint8 [..., N], 0 to 15, with float32 scales [..., ceil(N / group)]."""

    codes: Tensor
    scale: Tensor
    group: int

    def dequantized(self) -> Tensor:
        """Return float32 [..., N]: s times e2m1, exactly."""
        table = torch.tensor((*E2M1, *(-x for x in E2M1)), device=self.codes.device)
        scale = self.scale.repeat_interleave(self.group, -1)[..., : self.codes.shape[-1]]
        return table[self.codes.int()] * scale


def round_e4m3(x: Tensor) -> Tensor:
    """Return the nearest e4m3 number of float32 x >= 0, ties to even, at most 448, NaN for NaN.

    The rounding is done by arithmetic, because the casts of devices and versions differ in rounding and in overflow.
    """
    x = x.clamp(max=E4M3_MAX)
    subnormal = (x + 24576.0) - 24576.0  # The steps of float32 near 24576 are 2^-9, those of e4m3 below 2^-6.
    bits = x.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).view(torch.float32)
    return torch.where(x < 2.0**-6, subnormal, normal)


def e8m0_scale(largest: Tensor) -> Tensor:
    """Return the power of two 2^(floor(log2 max|X|) - 2), not below 2^-127 (OCP MX, version 1.0, section 6.3)."""
    code = ((largest.view(torch.int32) >> 23) - 2).clamp(min=0)
    return torch.where(code > 0, code << 23, 1 << 22).view(torch.float32)


def e2m1_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return the codes, uint8, of the e2m1 values nearest to x / scale: float32 of shapes that broadcast, scale >= 0.

    The function counts the midpoints that |x| passes. Their products with a scale are exact, so no quotient is rounded.
    Ties go to the even code, values beyond 6 become 6, and a scale of 0 gives zeros. A zero has no sign: its code is 0.
    """
    size = x.abs()
    code = torch.zeros(size.shape, dtype=torch.uint8, device=x.device)
    for above, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        passed = size >= midpoint * scale if above % 2 else size > midpoint * scale
        code += passed
    code = torch.where(scale > 0, code, 0)
    return torch.where((x < 0) & (code > 0), code + 8, code)


def head_unit(x: Tensor) -> Tensor:
    """Return the power of two, float32 [..., 1, 1], that brings max|X| of x [..., M, N] to 2^10 .. 2^11: the unit of
    its scales. Values that are not finite do not count, because the rest of the head would vanish beside them.

    The scales of NVFP4 reach from 2^-9 to 448. Without a unit, groups below 6 * 2^-10 would vanish and numbers above
    2688 would be cut off. A power of two changes no code of a group whose scale was a normal e4m3 number.
    """
    size = x.abs()
    exponent = torch.where(size < torch.inf, size, 0.0).amax((-2, -1), keepdim=True).view(torch.int32) >> 23
    return ((exponent - 10).clamp(min=1) << 23).view(torch.float32)


def quantize_fp4(x: Tensor, *, format: str = "nvfp4", unit: Tensor | float = 1.0) -> Fp4:
    """Compute phi of float32 x [..., N] in groups along its last axis; the last group may be shorter.

    unit: the power of two (float32, broadcast to the groups) that e4m3 scales are multiples of; see head_unit. It is
    not read for e8m0. A group with a NaN or an infinity has the scale NaN, so that everything computed from it is NaN.
    """
    rules = FORMATS[format]
    n = x.shape[-1]
    groups = pad(x, (0, -n % rules.group)).reshape(*x.shape[:-1], -1, rules.group)
    largest = groups.abs().amax(-1)
    if rules.e8m0:
        scale = e8m0_scale(largest)
    else:
        scale = round_e4m3(largest / unit * (1.0 / E2M1_MAX)) * unit
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = e2m1_codes(groups, scale[..., None]).flatten(-2)[..., :n]
    return Fp4(codes, scale, rules.group)


def quantize_probabilities(p: Tensor, *, format: str = "nvfp4", two_level: bool = True) -> Tensor:
    """Compute phi of P [..., N], N a multiple of TILE, 0 to 1, dequantized: float32 [..., N].

    two_level: multiply each row of a tile first, until its largest number is the largest of the format, and divide
    again at the end. Direct P uses 35 of the 127 scales of e4m3 and loses all values below e^-5; two-level P reaches
    e^-13.
    """
    if not two_level:
        return quantize_fp4(p, format=format).dequantized()
    tiles = p.reshape(*p.shape[:-1], -1, TILE)
    largest = tiles.amax(-1, keepdim=True)
    top = FORMATS[format].largest
    relative = torch.where(largest > 0, tiles / largest, 0.0) * top
    codes = quantize_fp4(relative, format=format)
    return torch.flatten(codes.dequantized() * (largest / top), -2)
