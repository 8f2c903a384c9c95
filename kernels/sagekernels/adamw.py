"""The update of AdamW in one pass over memory, for moments in 8 bits or bf16 and master weights in fp32 or bf16.

A program decodes some blocks of both moments, takes the gradient into them, updates the weights, finds the largest
magnitude of each block and encodes again. A value of 8-bit moments, an fp32 gradient and an fp32 master takes 16 bytes
of memory traffic. Operations are rounded one by one in the order of the twin, so its bits are the twin's.

The torch twins come first, then Triton.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, on_device_of
from .pieces import INTERPRETED

BLOCK = 256
"""The number of consecutive values that share a scale in 8 bits."""
_DECADES = tl.constexpr(7)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
TILES = {True: (1, 1), False: (4, 4)}
"""The blocks and warps of a program for moments in 8 bits, and for others. On an H200 a warp that shares nothing takes
6.2 ms for 1B values in 8 bits, and larger programs 6.6 to 9.5 (results/experts/update.py)."""


class Factors(NamedTuple):
    """The numbers of one update, which are the same for all values."""

    clip: float
    """The factor that gradients are multiplied by."""
    keep: float
    """The part of a weight that decay leaves."""
    first: float
    """The weight of the gradient in the first moment: 1 - beta1."""
    second: float
    """The weight of the squared gradient in the second moment: 1 - beta2."""
    beta2: float
    root: float
    """The factor of the second moment's root that corrects its bias: 1 / sqrt(1 - beta2^update)."""
    eps: float
    rate: float
    """The learning rate, with the correction of the first moment: lr / (1 - beta1^update)."""

    @classmethod
    def of(
        cls, lr: float, betas: tuple[float, float], eps: float, decay: float, update: int, clip: float = 1.0
    ) -> "Factors":
        """Return the factors of update number `update`, from 1."""
        first, second = betas
        root = (1 - second**update) ** -0.5
        return cls(clip, 1 - lr * decay, 1 - first, 1 - second, second, root, eps, lr / (1 - first**update))


class Moment(NamedTuple):
    """The memory of one moment."""

    values: Tensor
    """uint8 codes, or bf16 or fp32 numbers."""
    largest: Tensor | None = None
    """The largest magnitude of each block of codes."""


class Chance(NamedTuple):
    """The source of the random bits that round weights to bf16 (sagetrain/optim/weights.py)."""

    key: int
    """The hash of seed, update and tensor, in 32 bits."""
    first: int
    """The place of the first value in the tensor, or in the flattened slice that was cut along columns."""
    width: int = 0
    """The number of columns of such a slice; 0: places follow each other."""
    columns: int = 0
    """The number of columns of the whole tensor."""
    shift: int = 0
    """The column where the slice begins."""


class Master(NamedTuple):
    """The memory of master weights, 1-D in fp32 or bf16."""

    values: Tensor
    rest: Tensor | None = None
    """The rest that rounding left of bf16 values, in bf16. The weights are the sums."""
    chance: Chance | None = None
    """bf16 values are rounded by chance. The default rounds to the nearest number."""

    @property
    def rounding(self) -> str:
        """The name that kernels have for the way in which the weights are kept."""
        return "kahan" if self.rest is not None else "chance" if self.chance else "nearest"


@functools.lru_cache
def levels(signed: bool) -> Tensor:
    """Return 256 ascending levels in [-1, 1], or in [0, 1]. They are finer towards zero, by seven decades. Zero is
    among them, and so are the ends, so that the largest value of a block comes back exactly."""
    found = {0.0, 1.0}
    for exponent in range(_DECADES.value):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        found |= {float(middle) * 10.0 ** (exponent + 1 - _DECADES.value) for middle in (edges[:-1] + edges[1:]) / 2}
    if signed:
        found |= {-level for level in found}
        # There is one level too many.
        found.remove(max(level for level in found if level < 0))
    return torch.tensor(sorted(found), dtype=torch.float32)


@functools.lru_cache
def tables(device: torch.device) -> Tensor:
    """Return signed levels, the middles between them, unsigned levels and their middles: fp32 [4, 256]."""
    found = [each for signed in (True, False) for each in (levels(signed), _middles(levels(signed)))]
    return torch.stack([torch.nn.functional.pad(each, (0, 256 - len(each))) for each in found]).to(device)


def _middles(of: Tensor) -> Tensor:
    return (of[1:] + of[:-1]) / 2


def decode_twin(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """Return the fp32 values of codes, whose blocks have these largest magnitudes."""
    values = tables(codes.device)[0 if signed else 2][codes.int()]
    return values.mul_(largest.repeat_interleave(BLOCK)[: len(values)])


def encode_twin(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes of the nearest levels, and the largest magnitude of each block."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    # Smaller numbers are rounded by the division, so that reading and writing would not give the same bits.
    largest = torch.where(largest < torch.finfo(torch.float32).tiny, 0.0, largest)
    scaled = torch.where(largest[:, None] > 0, blocks / largest[:, None], 0.0)
    codes = torch.bucketize(scaled, tables(values.device)[1 if signed else 3, :-1], out_int32=True)
    if not signed:
        # A mean of squares that became zero, beside a mean of gradients that did not, would make an update of many
        # learning rates. The smallest level makes the update too small instead.
        codes.clamp_(min=(scaled > 0).int())
    return codes.view(-1)[: len(values)].to(torch.uint8), largest


def adamw_twin(weight: Tensor, gradient: Tensor, average: Tensor, squares: Tensor, of: Factors) -> None:
    """Update weights and moments in fp32, in place."""
    gradient = gradient.float() * of.clip
    average += (gradient - average) * of.first
    squares.mul_(of.beta2).add_(gradient * of.second * gradient)
    # A CPU's square root in fp32 may be off by a bit.
    root = squares.double().sqrt().float()
    weight.mul_(of.keep).sub_(average * of.rate / (root * of.root + of.eps))


@triton.jit
def read_moment(MOMENT, LARGEST, TABLES, row, place, rows, inside, ZERO: tl.constexpr, EIGHT_BITS: tl.constexpr):
    if EIGHT_BITS:
        codes = tl.load(MOMENT + place, mask=inside, other=ZERO).to(tl.int32)
        largest = tl.load(LARGEST + row, mask=rows, other=0.0)
        return tl.load(TABLES + codes) * largest[:, None]
    else:
        return tl.load(MOMENT + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _encode(CODES, LARGEST, TABLES, row, place, rows, inside, values, SIGNED: tl.constexpr):
    largest = tl.max(tl.abs(values), 1)
    largest = tl.where(largest < _TINY, 0.0, largest)
    tl.store(LARGEST + row, largest, mask=rows)
    some = largest > 0
    divisor = tl.where(some, largest, 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]
    divisor = divisor[:, None]
    if INTERPRETED:  # It has no fused multiply-add.
        scaled = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    else:
        # Two corrected products by the reciprocal round as a division does (Markstein), at a quarter of its price.
        scaled = values * inverse
        scaled = tl.fma(tl.fma(-scaled, divisor, values), inverse, scaled)
    scaled = tl.where(some[:, None], scaled, 0.0)
    magnitude = tl.abs(scaled)
    # Levels of a decade have the same distance, which is smaller in smaller decades. So the number of levels below a
    # magnitude is the smallest of these lines, up to half a level. The table then says on which side of the nearest
    # middle it lies.
    FIRST: tl.constexpr = 1.0 if SIGNED else 2.0
    below = tl.full(values.shape, 254.0, tl.float32)
    for decade in tl.static_range(_DECADES):
        line = tl.fma(magnitude, 1e6 / 0.9 * FIRST * 0.2**decade, FIRST * (2.0**decade * 8 / 9 - 1))
        below = tl.minimum(below, line)
    near = (below + 0.5).to(tl.int32)
    # The smallest negative level has no counterpart.
    middle = tl.where(scaled < 0, 127 - near, 127 + near) if SIGNED else near
    codes = middle + (scaled > tl.load(TABLES + 256 + middle)).to(tl.int32)
    if not SIGNED:
        codes = tl.maximum(codes, (scaled > 0).to(tl.int32))
    tl.store(CODES + place, codes.to(tl.uint8), mask=inside)


@triton.jit
def rounded_to_bf16(x):
    """Round to bf16, as fp32. The interpreter would cut bits off."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def write_moment(
    MOMENT, LARGEST, TABLES, row, place, rows, inside, values, SIGNED: tl.constexpr, EIGHT_BITS: tl.constexpr
):
    if EIGHT_BITS:
        _encode(MOMENT, LARGEST, TABLES, row, place, rows, inside, values, SIGNED)
    else:
        if MOMENT.dtype.element_ty == tl.bfloat16:
            values = rounded_to_bf16(values)
        tl.store(MOMENT + place, values.to(MOMENT.dtype.element_ty), mask=inside)


@triton.jit
def _mixed(x):
    """Return a hash of 32-bit numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 16)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def read_master(WEIGHT, REST, place, inside, MASTER: tl.constexpr):
    weight = tl.load(WEIGHT + place, mask=inside, other=0.0).to(tl.float32)
    if MASTER == "kahan":
        weight += tl.load(REST + place, mask=inside, other=0.0).to(tl.float32)
    return weight


@triton.jit
def write_master(WEIGHT, REST, place, inside, weight, at, key, width, columns, shift, MASTER: tl.constexpr):
    """Store fp32 weights as their master is kept. `at` is where they lie in their slice."""
    if MASTER == "chance":
        if width > 0:
            at = at // width * columns + shift + at % width
        bits = _mixed(_mixed(at.to(tl.uint32)) ^ key.to(tl.uint32)) >> 16
        bits = (weight.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
        weight = bits.to(tl.float32, bitcast=True)
    if MASTER == "kahan":
        # See KahanWeights.write.
        for _ in tl.static_range(2):
            rounded = rounded_to_bf16(weight)
            rest = rounded_to_bf16(weight - rounded)
            weight = rounded + rest
        tl.store(REST + place, rest.to(tl.bfloat16), mask=inside)
        weight = rounded
    tl.store(WEIGHT + place, weight.to(WEIGHT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key", "first"])
def _adamw_kernel(
    WEIGHT, REST, GRADIENT, AVERAGE, AVERAGE_LARGEST, SQUARES, SQUARES_LARGEST, TABLES, count,
    clip, keep, first_part, second_part, beta2, root, eps, rate, key, first, width, columns, shift,
    EIGHT_BITS: tl.constexpr, MASTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ROWS
    WEIGHT += begin * BLOCK
    REST += begin * BLOCK
    GRADIENT += begin * BLOCK
    AVERAGE += begin * BLOCK
    SQUARES += begin * BLOCK
    AVERAGE_LARGEST += begin
    SQUARES_LARGEST += begin
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    left = count - begin * BLOCK
    inside, rows = place < left, row * BLOCK < left
    gradient = tl.load(GRADIENT + place, mask=inside, other=0.0).to(tl.float32) * clip
    weight = read_master(WEIGHT, REST, place, inside, MASTER)
    average = read_moment(AVERAGE, AVERAGE_LARGEST, TABLES, row, place, rows, inside, 127, EIGHT_BITS)
    squares = read_moment(SQUARES, SQUARES_LARGEST, TABLES + 512, row, place, rows, inside, 0, EIGHT_BITS)
    average += (gradient - average) * first_part
    squares = squares * beta2 + gradient * second_part * gradient
    weight = weight * keep - tl.div_rn(average * rate, tl.sqrt_rn(squares) * root + eps)
    write_moment(AVERAGE, AVERAGE_LARGEST, TABLES, row, place, rows, inside, average, True, EIGHT_BITS)
    write_moment(SQUARES, SQUARES_LARGEST, TABLES + 512, row, place, rows, inside, squares, False, EIGHT_BITS)
    at = first + begin * BLOCK + place
    write_master(WEIGHT, REST, place, inside, weight, at, key, width, columns, shift, MASTER)


def adamw(weight: Master, gradient: Tensor, average: Moment, squares: Moment, of: Factors) -> None:
    """Update weights and moments on a GPU, in place, by a 1-D gradient in fp32 or bf16: the bits of adamw_twin between
    decode_twin and encode_twin."""
    (values, rest, chance), eight_bits = weight, average.largest is not None
    if not len(values):
        return
    found = chance or Chance(0, 0)
    # A key of 32 bits is a signed number for Triton, which would compile a kernel for larger ones.
    key, (rows, warps) = found.key - (found.key >> 31 << 32), TILES[eight_bits]
    with on_device_of(values):
        _adamw_kernel[(ceil_div(len(values), rows * BLOCK),)](
            values, values if rest is None else rest, gradient,
            average.values, average.largest if eight_bits else average.values,
            squares.values, squares.largest if eight_bits else squares.values,
            tables(values.device) if eight_bits else values, len(values), *of, key, *found[1:],
            EIGHT_BITS=eight_bits, MASTER=weight.rounding,
            ROWS=rows, BLOCK=BLOCK, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
