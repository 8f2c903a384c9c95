"""The update of Muon: momentum and direction in one pass, Newton-Schulz steps, and the new weights in one pass.

X X^T is symmetric, and so is its square. The products of Newton-Schulz steps compute the tiles above the diagonal and
store each one twice, which saves 30 % of the operations. All matrices of one shape go into one launch, because a
matrix alone does not fill a GPU. The bits of a matrix do not depend on the others in its launch.

The torch twins come first, then Triton.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adamw import (
    BLOCK,
    Chance,
    Master,
    Moment,
    read_master,
    read_moment,
    rounded_to_bf16,
    tables,
    write_master,
    write_moment,
)
from .int8_matmul import place_of
from .launch import ceil_div, on_device_of
from .pieces import INTERPRETED

QUINTIC = 3.4445, -4.7750, 2.0315
EPS = 1e-7
_NO_CHANCE = Chance(0, 0)

TILES_OF_VALUES = {True: (1, 1), False: (16, 8)}
"""The blocks and warps of a program that works value by value: with moments in 8 bits (as AdamW's), and with others."""
NORM_VALUES, NORM_WARPS = 8192, 8
"""The values of a matrix whose squares a program sums, and its warps."""


def direction_twin(momentum: Tensor, gradient: Tensor, out: Tensor, decay: float, nesterov: bool) -> None:
    """Take a gradient into the momentum (fp32, changed in place). Write the direction of the update to `out` in bf16.

    Args:
        gradient: bf16 or fp32.
        decay: the weight of the old momentum.
        nesterov: the direction is the mean of the gradient and the new momentum, with the same weights.
    """
    gradient = gradient.float()
    momentum.lerp_(gradient, 1 - decay)
    out.copy_(gradient.lerp(momentum, decay) if nesterov else momentum)


def add_update_twin(weight: Tensor, update: Tensor, keep: float, scale: float) -> None:
    """Set the weights (fp32) to `keep` times themselves plus `scale` times the update."""
    weight.mul_(keep).add_(update, alpha=scale)


def orthogonalize_twin(matrix: Tensor, steps: int) -> Tensor:
    """Return nearly U V^T of the singular value decomposition U S V^T of a bf16 matrix, by Newton-Schulz steps."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@triton.jit
def _directions_kernel(
    PARTS, GRADIENT, MOMENTUM, LARGEST, TABLES, OUT, blocks, clip, fresh,
    NESTEROV: tl.constexpr, EIGHT_BITS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PARTS += tl.program_id(0) // blocks * 5
    begin = (tl.program_id(0) % blocks).to(tl.int64) * ROWS
    # The table has the addresses, and the arguments of these names give the types alone.
    gradients, momentum = tl.load(PARTS).to(GRADIENT.dtype), tl.load(PARTS + 1).to(MOMENTUM.dtype)
    largest, first, count = tl.load(PARTS + 2).to(LARGEST.dtype) + begin, tl.load(PARTS + 3), tl.load(PARTS + 4)
    if ALIGNED:
        gradients, momentum = tl.multiple_of(gradients, 16), tl.multiple_of(momentum, 16)
        first, count = tl.multiple_of(first, 16), tl.multiple_of(count, 16)
    left = count - begin * BLOCK
    if left <= 0:
        return
    gradients += begin * BLOCK
    momentum += begin * BLOCK
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, rows = place < left, row * BLOCK < left
    gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * clip
    average = read_moment(momentum, largest, TABLES, row, place, rows, inside, 127, EIGHT_BITS)
    average += fresh * (gradient - average)
    write_moment(momentum, largest, TABLES, row, place, rows, inside, average, True, EIGHT_BITS)
    if NESTEROV:
        average -= fresh * (average - gradient)
    tl.store(OUT + first + begin * BLOCK + place, average.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _add_updates_kernel(
    PARTS, WEIGHT, REST, UPDATES, blocks, keep, scale, width, columns,
    MASTER: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PARTS += tl.program_id(0) // blocks * 7
    begin = (tl.program_id(0) % blocks).to(tl.int64) * (ROWS * BLOCK)
    weights, rest = tl.load(PARTS).to(WEIGHT.dtype), tl.load(PARTS + 1).to(REST.dtype)
    first, count = tl.load(PARTS + 2), tl.load(PARTS + 3)
    if ALIGNED:
        weights, rest = tl.multiple_of(weights, 16), tl.multiple_of(rest, 16)
        first, count = tl.multiple_of(first, 16), tl.multiple_of(count, 16)
    left = count - begin
    if left <= 0:
        return
    weights += begin
    rest += begin
    place = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = place < left
    update = tl.load(UPDATES + first + begin + place, mask=inside, other=0.0).to(tl.float32)
    weight = keep * read_master(weights, rest, place, inside, MASTER) + scale * update
    key, start, shift = tl.load(PARTS + 4), tl.load(PARTS + 5), tl.load(PARTS + 6)
    write_master(weights, rest, place, inside, weight, start + begin + place, key, width, columns, shift, MASTER)


@triton.jit
def _squares_kernel(X, SQUARES, count, chunks, VALUES: tl.constexpr):
    matrix, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    place = chunk * VALUES + tl.arange(0, VALUES)
    x = tl.load(X + matrix * count + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(SQUARES + tl.program_id(0), tl.sum(x * x))


@triton.jit
def _normalize_kernel(X, SQUARES, count, chunks, EPS: tl.constexpr, CHUNKS: tl.constexpr, VALUES: tl.constexpr):
    matrix, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    every = tl.arange(0, CHUNKS)
    squares = tl.sum(tl.load(SQUARES + matrix * chunks + every, mask=every < chunks, other=0.0))
    norm = tl.maximum(rounded_to_bf16(tl.sqrt_rn(squares)), EPS)
    place = chunk * VALUES + tl.arange(0, VALUES)
    x = tl.load(X + matrix * count + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(
        X + matrix * count + place, tl.div_rn(x, tl.zeros_like(x) + norm).to(X.dtype.element_ty), mask=place < count
    )


@triton.jit
def _product_kernel(
    LEFT, RIGHT, ADDEND, OUT, rows, columns, depth, alpha, beta,
    left_batch, left_row, left_depth, right_batch, right_row, right_depth, out_batch, out_row, out_column,
    SYMMETRIC: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Programs that run at the same time share rows and columns, which the L2 cache then holds.
    tile_row, tile_column = place_of(tile, across, down, GROUP)
    if SYMMETRIC:
        if tile_row > tile_column:
            return
    row, column = tile_row * ROWS + tl.arange(0, ROWS), tile_column * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    # Rows beyond the end are others again, and are not stored.
    left = LEFT + batch * left_batch + (row % rows)[:, None] * left_row + inner[None, :] * left_depth
    right = RIGHT + batch * right_batch + (column % columns)[None, :] * right_row + inner[:, None] * right_depth
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(depth, DEPTH)):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            inside = inner < depth - step * DEPTH
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += DEPTH * left_depth
        right += DEPTH * right_depth
    place = batch * out_batch + row[:, None].to(tl.int64) * out_row + column[None, :] * out_column
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    total *= alpha
    if ADD:
        total += beta * tl.load(ADDEND + place, mask=inside, other=0.0).to(tl.float32)
    result = total.to(OUT.dtype.element_ty)
    tl.store(OUT + place, result, mask=inside)
    if SYMMETRIC:
        if tile_row < tile_column:
            mirrored = batch * out_batch + column[:, None].to(tl.int64) * out_row + row[None, :] * out_column
            tl.store(OUT + mirrored, tl.trans(result), mask=(column < columns)[:, None] & (row < rows)[None, :])


TILES = {True: (128, 128, 64, 8, 4, 4), False: (128, 256, 64, 8, 8, 3)}
"""Rows, columns and depth of a tile, rows of tiles that share columns, warps and stages: of symmetric products, and of
others."""
SMALL_TILES = (128, 128, 32, 8, 4, 3)
"""The tile of GPUs with less shared memory than Hopper's."""


def product(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0,
    symmetric: bool = False, tiles: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Write alpha * left right^T + beta * addend to `out`, for each matrix of a batch, summed in fp32 and rounded once.

    Args:
        left: bf16 [batch, rows, depth], any strides.
        right: bf16 [batch, columns, depth], any strides.
        out: [batch, rows, columns], any strides.
        addend: the same shape and strides as `out`.
        symmetric: the result is symmetric.
        tiles: another entry than that of TILES.
    """
    batch, rows, depth = left.shape
    columns = right.shape[1]
    if tiles is None:
        hopper = left.is_cuda and torch.cuda.get_device_capability(left.device)[0] in (9, 10)
        tiles = TILES[symmetric] if hopper else SMALL_TILES
    block_rows, block_columns, block_depth, group, warps, stages = tiles
    grid = triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns), batch
    with on_device_of(left):
        _product_kernel[grid](
            left, right, out if addend is None else addend, out, rows, columns, depth, alpha, beta,
            *left.stride(), *right.stride(), *out.stride(),
            SYMMETRIC=symmetric, ADD=addend is not None, EVEN=depth % block_depth == 0, INTERPRETED=INTERPRETED,
            ROWS=block_rows, COLUMNS=block_columns, DEPTH=block_depth, GROUP=group, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def orthogonalize_triton(matrices: Tensor, steps: int) -> Tensor:
    """Compute orthogonalize_twin for each matrix of a bf16 batch [batch, rows, columns], which is overwritten."""
    a, b, c = QUINTIC
    normalize(matrices)
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    other, short = torch.empty_like(x), x.shape[1]
    gram, squared = (x.new_empty(len(x), short, short) for _ in range(2))
    for _ in range(steps):
        product(x, x, gram, symmetric=True)
        product(gram, gram, squared, gram, alpha=c, beta=b, symmetric=True)
        product(squared, x.mT, other, x, beta=a)
        x, other = other, x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def normalize(matrices: Tensor) -> None:
    """Divide each matrix of a contiguous bf16 batch [batch, rows, columns] by its norm, in place. The bits of a norm do
    not depend on the number of matrices, as those of torch's do."""
    assert matrices.is_contiguous()
    count = matrices[0].numel()
    chunks = ceil_div(count, NORM_VALUES)
    squares = torch.empty(len(matrices), chunks, dtype=torch.float32, device=matrices.device)
    how = {"VALUES": NORM_VALUES, "num_warps": NORM_WARPS}
    with on_device_of(matrices):
        _squares_kernel[(squares.numel(),)](matrices, squares, count, chunks, **how)
        most = triton.next_power_of_2(chunks)
        _normalize_kernel[(squares.numel(),)](matrices, squares, count, chunks, EPS=EPS, CHUNKS=most, **how)


@functools.lru_cache(maxsize=256)
def _table(parts: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return what the programs of a launch read about its parts. Addresses stay the same from step to step mostly."""
    made = torch.tensor(parts, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _even(parts: Sequence[tuple[int, ...]]) -> bool:
    """Return whether 16 divides the addresses, the places and the lengths of all parts."""
    return not any(number % 16 for part in parts for number in part)


def directions(
    momenta: Sequence[Moment], gradients: Sequence[Tensor], out: Tensor, decay: float, nesterov: bool, clip: float = 1.0
) -> None:
    """Compute direction_twin for many parts in one launch on a GPU, within its rounding.

    Args:
        momenta: the momentum of each part, all of them in one form.
        gradients: the gradient of each part, 1-D, all of them in fp32 or all in bf16.
        out: the directions of all parts, one after the other, 1-D in bf16.
        clip: what gradients are multiplied by first.
    """
    parts, first = list[tuple[int, ...]](), 0
    for (values, largest), gradient in zip(momenta, gradients, strict=True):
        at = values.data_ptr(), 0 if largest is None else largest.data_ptr()
        parts.append((gradient.data_ptr(), *at, first, gradient.numel()))
        first += gradient.numel()
    if not parts:
        return
    (values, scales), most = momenta[0], max(part[-1] for part in parts)
    eight_bits = scales is not None
    rows, warps = TILES_OF_VALUES[eight_bits]
    blocks = ceil_div(most, rows * BLOCK)
    with on_device_of(out):
        _directions_kernel[(len(parts) * blocks,)](
            _table(tuple(parts), out.device), gradients[0], values, scales if eight_bits else values,
            tables(out.device) if eight_bits else values, out, blocks, clip, 1 - decay,
            NESTEROV=nesterov, EIGHT_BITS=eight_bits, ALIGNED=_even([(*part[:2], *part[3:]) for part in parts]),
            ROWS=rows, BLOCK=BLOCK, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def add_updates(masters: Sequence[Master], updates: Tensor, places: Sequence[int], keep: float, scale: float) -> None:
    """Compute add_update_twin for many parts in one launch on a GPU, within its rounding, and round the weights as
    their masters are kept.

    Args:
        masters: the weights of each part, all of them in one form. Those that are rounded by chance are parts of
            tensors of one shape that are cut in the same way.
        updates: 1-D in bf16.
        places: the place in `updates` where the update of each part begins.
    """
    parts = list[tuple[int, ...]]()
    for (values, rest, chance), place in zip(masters, places, strict=True):
        of = chance or _NO_CHANCE
        at = values.data_ptr(), 0 if rest is None else rest.data_ptr()
        parts.append((*at, place, values.numel(), of.key, of.first, of.shift))
    if not parts:
        return
    (values, rest, chance), most = masters[0], max(part[3] for part in parts)
    of, (rows, warps) = chance or _NO_CHANCE, TILES_OF_VALUES[False]
    blocks = ceil_div(most, rows * BLOCK)
    with on_device_of(updates):
        _add_updates_kernel[(len(parts) * blocks,)](
            _table(tuple(parts), updates.device), values, values if rest is None else rest, updates,
            blocks, keep, scale, of.width, of.columns,
            MASTER=masters[0].rounding, ALIGNED=_even([part[:4] for part in parts]),
            ROWS=rows, BLOCK=BLOCK, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return each matrix of a batch orthogonalized, bf16 [batch, rows, columns]: see orthogonalize_twin. The batch is
    overwritten."""
    if matrices.is_cuda:
        return orthogonalize_triton(matrices, steps)
    return torch.stack([orthogonalize_twin(matrix, steps) for matrix in matrices])
