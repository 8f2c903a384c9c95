"""Products of a mixture of experts: each row by the weight of its expert, and the gradients of the weights. The torch
twins, then Triton.

A program computes a tile of one expert's rows (grouped.Rows.tiles) by some columns. It reads the rows behind the
expert's last one with the tile and does not write them. A gradient of weights is a sum over the rows of an expert: no
sum is split, so results have the same bits always.

Codes in 8 bits are multiplied as int8_matmul.py does: INT8's sums are exact, and all are scaled where they were made,
by the rows' scales first. Both operands run along the dim that is summed over. In 16 bits torch._grouped_mm multiplies
on Hopper, and Triton's kernels elsewhere, where torch's own would wait for the host.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .casts import DTYPES, INT8
from .grouped import TILE
from .int8_matmul import TILES, ProductTile, codes_family, codes_kernel, load_codes, operands, place_of
from .launch import capability, ceil_div, on_device_of
from .operators import by_device, operator
from .pieces import INTERPRETED


def grouped_product_twin(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each row of x [R, K] times the matrix [K, N] of its expert; zeros for empty rows."""
    out = x.new_zeros(len(x), weight.shape[2])
    begin = 0
    for of_expert, end in zip(weight, ends.tolist(), strict=True):
        out[begin:end] = x[begin:end] @ of_expert
        begin = end
    return out


def grouped_weight_product_twin(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a^T b over the rows of each expert: [R, N] and [R, K] to [E, N, K]; zeros where an expert has no rows."""
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
        begin = end
    return out


def grouped_codes_product_twin(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tiles: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each row of a [R, K] times the codes [N, K] of its expert, transposed: exact in float64, rounded once."""
    scaled = b[..., : a.shape[1]].double() * b_scale.double()[..., None]
    return grouped_product_twin(a.double() * a_scale.double(), scaled.mT, ends).to(dtype)


def grouped_codes_weight_product_twin(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return a b^T over the columns of each expert, of transposed codes [N, P] and [K, P] with scales [E, N] and
    [E, K]: [E, N, K], exact in float64 and rounded once."""
    bounds = [TILE * place for place in first.tolist()]
    parts = (a[:, s:e].double() @ b[:, s:e].double().t() for s, e in itertools.pairwise(bounds))
    return (torch.stack(list(parts)) * a_scale.double()[:, :, None] * b_scale.double()[:, None]).to(dtype)


WIDE_TILE = ProductTile(TILE, 128, 32, 8, 3)
"""The tile of one program of 16-bit products. In fp32 half as many are summed at a time."""


@triton.jit
def _place(across, down, GROUP: tl.constexpr):
    """Return the row and the column of this program's tile in its matrix."""
    return place_of(tl.program_id(0) % (across * down), across, down, GROUP)


@triton.jit
def _codes_product_kernel(
    A, A_SCALE, B, B_SCALE, OUT, TILES, rows, b_rows, columns, inner, down,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    DESCRIBED: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by the codes of their expert, which are `columns` rows of B from its first one on. A and
    B are pointers or, with DESCRIBED, descriptors of copies by the copy engine."""
    SUM: tl.constexpr = tl.int32 if INT else tl.float32
    tile, right = _place(tl.cdiv(columns, BLOCK_N), down, GROUP)
    left = right * BLOCK_N
    expert = tl.load(TILES + 4 * tile)
    top, end = tl.load(TILES + 4 * tile + 1), tl.load(TILES + 4 * tile + 2)
    # A branch around the loop would keep its loads from being issued ahead. A tile of empty rows sums nothing.
    steps = tl.where((expert >= 0) & (top < end), inner, 0)
    expert = tl.maximum(expert, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for at in tl.range(0, steps, BLOCK_K):
        a = load_codes(A, top, at, rows, inner, BLOCK_M, BLOCK_K, DESCRIBED, INT)
        b = load_codes(B, expert * columns + left, at, b_rows, inner, BLOCK_N, BLOCK_K, DESCRIBED, INT)
        total = tl.dot(a, b.T, total, out_dtype=SUM)
    row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    of_a = tl.load(A_SCALE + row, mask=(row < end) & (steps > 0), other=0.0)
    of_b = tl.load(B_SCALE + expert * columns + column, mask=(column < columns) & (steps > 0), other=0.0)
    scaled = total.to(tl.float32) * of_a[:, None] * of_b[None, :]
    out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, scaled.to(OUT.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _load_part(X, first, last, first_stride, second, many, second_stride, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Load a part of a matrix of any strides, with zeros from `last` and `many` on."""
    one, other = first + tl.arange(0, FIRST), second + tl.arange(0, SECOND)
    inside = (one < last)[:, None] & (other < many)[None, :]
    x = tl.load(X + one.to(tl.int64)[:, None] * first_stride + other[None, :] * second_stride, mask=inside, other=0.0)
    if INTERPRETED:  # It multiplies the bits of bfloat16.
        x = x.to(tl.float32)
    return x


@triton.jit
def _product_kernel(
    X, WEIGHT, OUT, TILES, columns, inner, stride, of_expert, of_inner, of_column, down,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by the matrix [inner, columns] of their expert, which has any strides."""
    tile, right = _place(tl.cdiv(columns, BLOCK_N), down, GROUP)
    left = right * BLOCK_N
    expert = tl.load(TILES + 4 * tile)
    top, end = tl.load(TILES + 4 * tile + 1), tl.load(TILES + 4 * tile + 2)
    steps = tl.where((expert >= 0) & (top < end), inner, 0)
    WEIGHT += tl.maximum(expert, 0).to(tl.int64) * of_expert
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(0, steps, BLOCK_K):
        x = _load_part(X, top, end, stride, at, inner, 1, BLOCK_M, BLOCK_K)
        weight = _load_part(WEIGHT, at, inner, of_inner, left, columns, of_column, BLOCK_K, BLOCK_N)
        total = tl.dot(x, weight, total, input_precision="ieee")
    row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _weight_product_kernel(
    A, B, OUT, ENDS, a_columns, b_columns, a_stride, b_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply two matrices of rows over the rows of one expert."""
    down, across = tl.cdiv(a_columns, BLOCK_M), tl.cdiv(b_columns, BLOCK_N)
    expert = tl.program_id(0) // (down * across)
    below, right = _place(across, down, GROUP)
    top, left = below * BLOCK_M, right * BLOCK_N
    begin, end = tl.load(ENDS + expert - 1, mask=expert > 0, other=0), tl.load(ENDS + expert)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(begin, end, BLOCK_K):
        a = _load_part(A, at, end, a_stride, top, a_columns, 1, BLOCK_K, BLOCK_M)
        b = _load_part(B, at, end, b_stride, left, b_columns, 1, BLOCK_K, BLOCK_N)
        total = tl.dot(a.T, b, total, input_precision="ieee")
    row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    out = OUT + (expert.to(tl.int64) * a_columns + row)[:, None] * b_columns + column[None, :]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=(row < a_columns)[:, None] & (column < b_columns)[None, :])


@triton.jit
def _clear_rows_kernel(OUT, TILES, columns, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write zeros to the tiles of empty rows."""
    at = TILES + 4 * tl.program_id(0)
    if tl.load(at) < 0:
        row = tl.load(at + 1) + tl.arange(0, TILE)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < tl.load(at + 2))[:, None] & (column < columns)[None, :]
        tl.store(out, tl.zeros([TILE, COLUMNS], OUT.dtype.element_ty), mask=inside)


@triton.jit
def _clear_experts_kernel(OUT, ENDS, size, BLOCK: tl.constexpr):
    """Write zeros to the matrices, of `size` numbers each, of experts without rows."""
    expert = tl.program_id(0)
    if tl.load(ENDS + expert - 1, mask=expert > 0, other=0) == tl.load(ENDS + expert):
        for at in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            place = at + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], OUT.dtype.element_ty)
            tl.store(OUT + expert.to(tl.int64) * size + place, zeros, mask=place < size)


def grouped_codes_product_triton(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tiles: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute grouped_codes_product_twin on a GPU, within the roundings of fp32 and the one to dtype."""
    (rows, inner), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    family, flat = codes_family(a.device, a.dtype), b.view(-1, inner)
    tile, described = TILES[family], family == "sm_90"
    first, second = operands(a, flat, tile, described)
    with on_device_of(a):
        _codes_product_kernel[(len(tiles) * ceil_div(columns, tile.block_n),)](
            first, a_scale, second, b_scale, out, tiles, rows, len(flat), columns, inner, len(tiles),
            DESCRIBED=described, INT=a.dtype == INT8, **tile.launch,
        )  # fmt: skip
    return out


def grouped_codes_weight_product_triton(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute grouped_codes_weight_product_twin on a GPU, within the roundings of fp32 and the one to dtype."""
    experts, outputs, inputs = len(a_scale), len(a), len(b)
    out = torch.empty(experts, outputs, inputs, dtype=dtype, device=a.device)
    family = codes_family(a.device, a.dtype)
    tile, described = TILES[family], family == "sm_90"
    one, other = operands(a, b, tile, described)
    with on_device_of(a):
        codes_kernel[(experts * ceil_div(outputs, tile.block_m) * ceil_div(inputs, tile.block_n),)](
            one, a_scale, other, b_scale, out, first, outputs, inputs, a.shape[1],
            TILE=TILE, DESCRIBED=described, INT=a.dtype == INT8, **tile.launch,
        )  # fmt: skip
    return out


def _wide_tile(x: Tensor) -> ProductTile:
    """Return the tile of products in the dtype of x."""
    return WIDE_TILE if x.element_size() == 2 else WIDE_TILE._replace(block_k=16)


def grouped_product_triton(x: Tensor, weight: Tensor, tiles: Tensor) -> Tensor:
    """Compute grouped_product_twin on a GPU: sums in fp32, rounded once."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, inner), columns = x.shape, weight.shape[2]
    out = x.new_empty(rows, columns)
    tile = _wide_tile(x)
    if out.numel():
        with on_device_of(x):
            _product_kernel[(len(tiles) * ceil_div(columns, tile.block_n),)](
                x, weight, out, tiles, columns, inner, x.stride(0), *weight.stride(), len(tiles), **tile.launch
            )
    return out


def grouped_weight_product_triton(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Compute grouped_weight_product_twin on a GPU: sums in fp32, rounded once."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    experts, outputs, inputs = len(ends), a.shape[1], b.shape[1]
    out = a.new_empty(experts, outputs, inputs)
    tile = _wide_tile(a)
    with on_device_of(a):
        _weight_product_kernel[(experts * ceil_div(outputs, tile.block_m) * ceil_div(inputs, tile.block_n),)](
            a, b, out, ends, outputs, inputs, a.stride(0), b.stride(0), **tile.launch
        )
    return out


def clear_rows(out: Tensor, tiles: Tensor) -> Tensor:
    """Write zeros to the empty rows of a matrix [R, N] on a GPU."""
    with on_device_of(out):
        _clear_rows_kernel[(len(tiles), ceil_div(out.shape[1], 128))](
            out, tiles, out.shape[1], TILE=TILE, COLUMNS=128, num_warps=4
        )
    return out


def clear_experts(out: Tensor, ends: Tensor) -> Tensor:
    """Write zeros to the matrices [N, K] of experts without rows on a GPU."""
    with on_device_of(out):
        _clear_experts_kernel[(len(ends), 16)](out, ends, out[0].numel(), BLOCK=4096, num_warps=4)
    return out


def _by_torch(*operands: Tensor) -> bool:
    """Return whether torch._grouped_mm multiplies these without a wait of the host."""
    return capability(operands[0].device)[0] == 9 and all(
        x.dtype == torch.bfloat16 and x.numel() and x.data_ptr() % 16 == 0 and not any(n % 8 for n in x.shape[1:])
        for x in operands
    )


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor, tiles: Tensor) -> Tensor:
    if not x.is_cuda or x.dtype not in DTYPES:
        return grouped_product_twin(x, weight, ends)
    x = x.contiguous()
    if _by_torch(x, weight):
        return clear_rows(torch._grouped_mm(x, weight, offs=ends), tiles)
    return grouped_product_triton(x, weight, tiles)


GROUPED_PRODUCT = operator(_grouped_product, lambda x, weight, ends, tiles: x.new_empty(x.shape[0], weight.shape[2]))


def _grouped_weight_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if not a.is_cuda or a.dtype not in DTYPES:
        return grouped_weight_product_twin(a, b, ends)
    a, b = a.contiguous(), b.contiguous()
    if _by_torch(a, b):
        return clear_experts(torch._grouped_mm(a.t(), b, offs=ends), ends)
    return grouped_weight_product_triton(a, b, ends)


GROUPED_WEIGHT_PRODUCT = operator(
    _grouped_weight_product, lambda a, b, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1])
)


def _grouped_codes_product_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tiles: Tensor, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


GROUPED_CODES_PRODUCT = by_device(
    "grouped_codes_product", grouped_codes_product_twin, grouped_codes_product_triton, _grouped_codes_product_fake
)


def _grouped_codes_weight_product_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a_scale.shape[0], a.shape[0], b.shape[0], dtype=dtype)


GROUPED_CODES_WEIGHT_PRODUCT = by_device(
    "grouped_codes_weight_product",
    grouped_codes_weight_product_twin,
    grouped_codes_weight_product_triton,
    _grouped_codes_weight_product_fake,
)
