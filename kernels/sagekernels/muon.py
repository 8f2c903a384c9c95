"""The update of Muon: momentum and direction in one pass, Newton-Schulz steps, and the new weights in one pass.

X X^T is symmetric, and so is its square. The products of Newton-Schulz steps compute the tiles above the diagonal and
store each one twice, which saves 30 % of the operations. All matrices of one shape go into one launch, because a
matrix alone does not fill a GPU. The bits of a matrix do not depend on the others in its launch.

The torch twins come first, then Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device_of
from .pieces import INTERPRETED

QUINTIC = 3.4445, -4.7750, 2.0315
EPS = 1e-7

# A program takes so many values of a vector.
VALUES, VALUE_WARPS = 4096, 8


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
def _direction_kernel(MOMENTUM, GRADIENT, OUT, count, decay, NESTEROV: tl.constexpr, VALUES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = place < count
    gradient = tl.load(GRADIENT + place, mask=inside, other=0.0).to(tl.float32)
    momentum = tl.load(MOMENTUM + place, mask=inside, other=0.0)
    momentum += (1.0 - decay) * (gradient - momentum)
    tl.store(MOMENTUM + place, momentum, mask=inside)
    if NESTEROV:
        momentum -= (1.0 - decay) * (momentum - gradient)
    tl.store(OUT + place, momentum.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _add_update_kernel(WEIGHT, UPDATE, count, keep, scale, VALUES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = place < count
    weight = tl.load(WEIGHT + place, mask=inside, other=0.0)
    update = tl.load(UPDATE + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(WEIGHT + place, keep * weight + scale * update, mask=inside)


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
    first = tile // (GROUP * across) * GROUP
    high = min(down - first, GROUP)
    tile_row, tile_column = first + tile % (GROUP * across) % high, tile % (GROUP * across) // high
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
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    # One norm at a time, because the bits of a norm would depend on the number of matrices.
    x.div_(torch.stack([matrix.norm() for matrix in x]).clamp_(min=EPS)[:, None, None])
    other, short = torch.empty_like(x), x.shape[1]
    gram, squared = (x.new_empty(len(x), short, short) for _ in range(2))
    for _ in range(steps):
        product(x, x, gram, symmetric=True)
        product(gram, gram, squared, gram, alpha=c, beta=b, symmetric=True)
        product(squared, x.mT, other, x, beta=a)
        x, other = other, x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def direction_triton(momentum: Tensor, gradient: Tensor, out: Tensor, decay: float, nesterov: bool) -> None:
    """Compute direction_twin on a GPU, within its rounding."""
    with on_device_of(momentum):
        _direction_kernel[(triton.cdiv(len(momentum), VALUES),)](
            momentum, gradient, out, len(momentum), decay, NESTEROV=nesterov, VALUES=VALUES, num_warps=VALUE_WARPS
        )


def add_update_triton(weight: Tensor, update: Tensor, keep: float, scale: float) -> None:
    """Compute add_update_twin on a GPU, within its rounding."""
    with on_device_of(weight):
        _add_update_kernel[(triton.cdiv(len(weight), VALUES),)](
            weight, update, len(weight), keep, scale, VALUES=VALUES, num_warps=VALUE_WARPS
        )


def direction(momentum: Tensor, gradient: Tensor, out: Tensor, decay: float, nesterov: bool) -> None:
    """Take a gradient into the momentum, and write the direction of the update: see direction_twin."""
    (direction_triton if momentum.is_cuda else direction_twin)(momentum, gradient, out, decay, nesterov)


def add_update(weight: Tensor, update: Tensor, keep: float, scale: float) -> None:
    """Set weights to `keep` times themselves plus `scale` times the update: see add_update_twin."""
    (add_update_triton if weight.is_cuda else add_update_twin)(weight, update, keep, scale)


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return each matrix of a batch orthogonalized: see orthogonalize_twin. The batch is overwritten.

    Args:
        matrices: bf16 [batch, rows, columns].
    """
    if matrices.is_cuda:
        return orthogonalize_triton(matrices, steps)
    return torch.stack([orthogonalize_twin(matrix, steps) for matrix in matrices])
