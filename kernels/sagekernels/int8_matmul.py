"""The product of two matrices of INT8 codes with their scales, in 16 bits or fp32 at once: the torch twin, then Triton.

torch._int_mm leaves int32, which another kernel reads to scale it: 4 bytes an element are written and read again. Here
sums are scaled in the registers where they were made. Rows of both operands run along the dim that is summed over, as
Hopper's matrix instructions want them.

On Hopper hopper_int8.cu multiplies. Triton waits for every INT8 product there before it issues the next one (only sums
in fp32 overlap), so its tiles are so small that two programs fit on a multiprocessor. It serves what the CUDA kernel
does not take, with the same bits. results/log/kernels.md lists the other shapes that were timed.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import hopper_int8, nvrtc
from .casts import DTYPES, INT8, MULTIPLE
from .launch import capability, ceil_div, check_int8, on_device_of
from .operators import operator
from .pieces import INTERPRETED

PIECE = 131072
"""The number of products of codes that are summed in int32, which holds 133,144 of the largest. Longer sums are made in
pieces."""


class ProductTile(NamedTuple):
    """The tile of one program, which computes BLOCK_M x BLOCK_N results, BLOCK_K products of each at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict[str, int]:
        """The constants and options of a launch."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "GROUP": GROUP, "num_warps": self.num_warps, "num_stages": self.num_stages}


TILES = {"sm_90": ProductTile(128, 128, 128, 4, 3), "portable": ProductTile(128, 128, 64, 4, 3)}
"""The tile of products of codes, by family of architectures (codes_family)."""
GROUP = 8
"""The number of tiles below each other that are computed before those to their right. They share the part of b that L2
holds."""


def product_twin(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a b^T, [rows of a, rows of b], of codes in any format: exact in float64, and rounded once."""
    return (a.double() @ b.double().t() * a_scale.double() * b_scale.double().t()).to(dtype)


@triton.jit
def place_of(tile, across, down, GROUP: tl.constexpr):
    """Return the row and the column of a tile. Tiles are numbered down groups of GROUP of them, then to the right."""
    first = tile // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % high, within // high


@triton.jit
def load_codes(
    X, row, at, rows, inner, ROWS: tl.constexpr, INNER: tl.constexpr, DESCRIBED: tl.constexpr, INT: tl.constexpr
):
    """Load codes [ROWS, INNER] from a row and a column on, with 0 outside the matrix."""
    if DESCRIBED:
        x = X.load([row, at])
    else:
        of = row + tl.arange(0, ROWS)
        step = at + tl.arange(0, INNER)
        inside = (of < rows)[:, None] & (step < inner)[None, :]
        x = tl.load(X + of.to(tl.int64)[:, None] * inner + step[None, :], mask=inside, other=0.0)
    if INTERPRETED and not INT:  # It multiplies the bits of FP8.
        x = x.to(tl.float32)
    return x


@triton.jit
def codes_kernel(
    A, A_SCALE, B, B_SCALE, OUT, FIRST, rows, columns, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    DESCRIBED: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Compute one tile of results per program. A and B are pointers or, with DESCRIBED, descriptors of copies by the
    copy engine.

    FIRST: there is a result for each expert, of the columns of its tiles (grouped.Rows.first). Zeros fill the last one,
    so an expert without rows gets zeros.
    """
    SUM: tl.constexpr = tl.int32 if INT else tl.float32
    across, down = tl.cdiv(columns, BLOCK_N), tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    begin = 0
    end = inner
    if FIRST is not None:
        expert = tile // (down * across)
        tile = tile % (down * across)
        begin, end = tl.load(FIRST + expert) * TILE, tl.load(FIRST + expert + 1) * TILE
        A_SCALE += expert * rows
        B_SCALE += expert * columns
        OUT += expert.to(tl.int64) * rows * columns
    below, right = place_of(tile, across, down, GROUP)
    top, left = below * BLOCK_M, right * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for at in tl.range(begin, end, BLOCK_K):
        a = load_codes(A, top, at, rows, inner, BLOCK_M, BLOCK_K, DESCRIBED, INT)
        b = load_codes(B, left, at, columns, inner, BLOCK_N, BLOCK_K, DESCRIBED, INT)
        total = tl.dot(a, b.T, total, out_dtype=SUM)
    row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    of_a = tl.load(A_SCALE + row, mask=row < rows, other=0.0)
    of_b = tl.load(B_SCALE + column, mask=column < columns, other=0.0)
    # The scales are applied one after the other, because the product of two small scales may be less than any float.
    scaled = total.to(tl.float32) * of_a[:, None] * of_b[None, :]
    out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, scaled.to(OUT.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def int8_product_triton(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, tile: ProductTile | None = None
) -> Tensor:
    """Compute product_twin on a GPU, within the roundings of fp32 and the one to dtype. Without `tile` the architecture
    decides it."""
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    (rows, inner), (columns, _) = a.shape, b.shape
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if not (rows and columns):
        return out
    family = codes_family(a.device, INT8)
    tile, described = tile or TILES[family], family == "sm_90"
    first, second = operands(a, b, tile, described)
    programs = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n)
    with on_device_of(a):
        codes_kernel[(programs,)](
            first, a_scale, second, b_scale, out, None, rows, columns, inner,
            TILE=0, DESCRIBED=described, INT=True, **tile.launch,
        )  # fmt: skip
    return out


def operands(a: Tensor, b: Tensor, tile: ProductTile, described: bool) -> tuple[object, object]:
    """Return codes as a kernel takes them, as descriptors if it is to copy by the copy engine."""
    a, b = aligned(a), aligned(b)
    if not described:
        return a, b
    return tuple(
        # The stride of a single row may be any number, so it is set here.
        TensorDescriptor(x, x.shape, [x.shape[1], 1], [block, tile.block_k])
        for x, block in ((a, tile.block_m), (b, tile.block_n))
    )


@functools.cache
def codes_family(device: torch.device, number: torch.dtype) -> str:
    """Return the row of TILES for a device. Raises NotImplementedError if its products in this format are slow or do
    not exist."""
    if device.type != "cuda":
        return "portable"
    found = capability(device)
    if number == INT8:
        check_int8(found, by_tensor_memory=True)
    elif found < (8, 9):
        raise NotImplementedError(
            f"FP8 products of experts need compute capability 8.9 (Ada) or newer, got {found[0]}.{found[1]}; use int8 "
            "or 16 bits"
        )
    return "sm_90" if found[0] == 9 else "portable"


@functools.cache
def _by_cuda(device: torch.device) -> bool:
    """Return whether hopper_int8.cu runs on a device. Without NVRTC, which compiles it, Triton's kernel does."""
    return codes_family(device, INT8) == "sm_90" and nvrtc.available()


def begin(device: torch.device, dtype: torch.dtype) -> None:
    """Begin to compile the CUDA kernel of products with results in `dtype`, in a thread, where there is one."""
    if capability(device) == (9, 0) and _by_cuda(device):
        nvrtc.begin(hopper_int8.SOURCE, hopper_int8.defines_of(dtype), hopper_int8.ARCHITECTURE)


def _crowded() -> bool:
    """Return whether collectives may hold multiprocessors beside a product."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def aligned(codes: Tensor) -> Tensor:
    """Return the codes, copied if they are not contiguous or do not begin at a multiple of 16 bytes. All rows then
    begin at one."""
    codes = codes.contiguous()
    return codes.clone() if codes.data_ptr() % MULTIPLE else codes


def _int8_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not a.is_cuda:
        return product_twin(a, a_scale, b, b_scale, dtype)
    if len(a) and hopper_int8.takes(len(b)) and _by_cuda(a.device):
        scales = a_scale.contiguous(), b_scale.contiguous()
        return hopper_int8.hopper_int8_product(aligned(a), scales[0], aligned(b), scales[1], dtype, _crowded())
    return int8_product_triton(a, a_scale, b, b_scale, dtype)


INT8_PRODUCT = operator(
    _int8_product, lambda a, a_scale, b, b_scale, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
)


def int8_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a b^T of codes and scales, [rows of a, rows of b], by one operator that torch.compile takes as one node.

    Args:
        a: int8 [M, K], -127 .. 127. No gradient goes through.
        a_scale: fp32 [M, 1]. NaN makes the results of its rows NaN.
        b: int8 [N, K].
        b_scale: fp32 [N, 1].
        dtype: the dtype of the result: torch.bfloat16, float16 or float32.

    Sums are exact, in int32. Beyond PIECE products each piece is exact, and the scaled sums of the pieces are added in
    fp32. Sums are scaled in fp32, by a_scale first. Where a sum times its a_scale is beyond fp32 (scales of 1e29 and
    more) the result is infinite, whatever b_scale is.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: the shapes do not belong together, or K is no multiple of 16.
    """
    if a.dtype != INT8 or b.dtype != INT8 or dtype not in DTYPES:
        raise TypeError(f"int8_product takes int8 to bf16, fp16 or fp32, got {a.dtype} and {b.dtype} to {dtype}")
    if a_scale.dtype != torch.float32 or b_scale.dtype != torch.float32:
        raise TypeError(f"int8_product takes scales in fp32, got {a_scale.dtype} and {b_scale.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"int8_product takes [M, K] and [N, K], got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    for codes, scale in ((a, a_scale), (b, b_scale)):
        if scale.shape != (len(codes), 1):
            raise ValueError(
                f"int8_product takes a scale for each row, got shape {tuple(scale.shape)} for {tuple(codes.shape)}"
            )
    if a.shape[1] % MULTIPLE or not a.shape[1]:
        raise ValueError(f"int8_product sums over multiples of {MULTIPLE}, got K {a.shape[1]}")
    if a.shape[1] <= PIECE:
        return INT8_PRODUCT(a, a_scale, b, b_scale, dtype)
    pieces = (  # Pieces are computed one at a time, because each is as large as the result.
        INT8_PRODUCT(ours, a_scale, theirs, b_scale, torch.float32)
        for ours, theirs in zip(a.split(PIECE, 1), b.split(PIECE, 1), strict=True)
    )
    total = next(pieces)
    for piece in pieces:
        total += piece
    return total.to(dtype)
