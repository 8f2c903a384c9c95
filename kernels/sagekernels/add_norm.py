"""x + y and its RMSNorm, with the largest magnitudes that casts need: the torch twin, then Triton.

Both directions are one pass each. Forward, x and y are read, and the sum and its norm are written. Backward, the
gradients of both and the sum are read, and one gradient is written, which is that of x and of y. A program has whole
rows in hand. So it leaves the largest magnitudes of rows as it goes, and those of its columns at the end
(casts.largest_kernel). The cast of the norm, or of the gradient, then reads its matrix once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .casts import largest_twin, magnitudes, widened
from .launch import ceil_div, on_device_of
from .operators import by_device
from .qk_norm_rope import sum_rows, with_rows

# A program has a tile of rows, one after the other, and loads of the next ones are on their way. Tiles are such that
# PROGRAMS programs have all rows, because each one fills its pipeline anew and compares its columns with the others:
# 132 multiprocessors hold so many at once with 2,048 columns. On an H200 32,768 rows took 159 us forward and 158
# backward with tiles of 64, 176 and 181 with 32.
PROGRAMS = 512
LEAST_ROWS, MOST_ROWS = 8, 64
# A thread has so many columns of a row. Backward 8 of 4,096 columns took 99 registers of 512 threads, so that a
# multiprocessor held one program, and 365 us. 16 took 121 of 256, two programs, and 305. Forward 8 leave room for two:
# 304 us, and 16 took 312.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 8, 16
_MOST_WARPS = 32
# Triton holds all stages but one in shared memory, of which Ada and consumer Blackwell have 99 KiB.
STAGES, SHARED = 3, 96 << 10


def add_norm_twin(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y, its RMSNorm times a gain, and the largest magnitudes of the latter."""
    stream = x + y
    wide = stream.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale * gain.float()).to(x.dtype)
    return stream, normed, largest_twin(normed)


def add_norm_gradients_twin(
    of_stream: Tensor, of_normed: Tensor, stream: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, which is that of y too, from those of x + y and of its norm; the gradient of the gain;
    and the largest magnitudes of the former. Gradients are computed in float32 and rounded once. In float32 they have
    the bits of autograd."""
    wide, grad = stream.float(), of_normed.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    of_gain = (grad * (wide * scale)).sum(0).to(gain.dtype)
    grad = grad * gain.float()
    of_mean = -0.5 * (grad * wide).sum(-1, keepdim=True) * scale.pow(3)
    of_squares = of_mean.expand_as(wide) / wide.shape[1]
    of_x = (of_stream.float() + grad * scale + of_squares * (2.0 * wide)).to(of_stream.dtype)
    return of_x, of_gain, largest_twin(of_x)


@triton.jit
def add_norm_kernel(
    X, Y, GAIN, STREAM, OUT, LARGEST, rows, columns, x_stride, y_stride, eps,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Add and normalize TILE rows. Columns are compared in registers, and with other programs at the end."""
    column = tl.arange(0, COLUMNS)
    within = column < columns
    gain = tl.load(GAIN + column, mask=within, other=0.0).to(tl.float32)
    of_columns = tl.zeros([COLUMNS], tl.int16 if NARROW else tl.int32)
    first = tl.program_id(0) * TILE
    for step in tl.range(tl.minimum(TILE, rows - first), num_stages=STAGES):
        row = (first + step).to(tl.int64)
        x = tl.load(X + row * x_stride + column, mask=within, other=0.0).to(tl.float32)
        y = tl.load(Y + row * y_stride + column, mask=within, other=0.0).to(tl.float32)
        stream = (x + y).to(STREAM.dtype.element_ty)
        wide = stream.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
        normed = (wide * scale * gain).to(OUT.dtype.element_ty)
        tl.store(STREAM + row * columns + column, stream, mask=within)
        tl.store(OUT + row * columns + column, normed, mask=within)
        bits = magnitudes(normed, NARROW)
        of_columns = tl.maximum(of_columns, bits)
        tl.store(LARGEST + row, widened(tl.max(bits, 0), NARROW))
    tl.atomic_max(LARGEST + rows + column, widened(of_columns, NARROW), mask=within, sem="relaxed")


@triton.jit
def add_norm_gradients_kernel(
    OF_STREAM, OF_NORMED, STREAM, GAIN, OUT, PARTIAL, LARGEST, rows, columns, of_stream_stride, of_normed_stride, eps,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of TILE rows, and into PARTIAL their sum for the gain."""
    column = tl.arange(0, COLUMNS)
    within = column < columns
    gain = tl.load(GAIN + column, mask=within, other=0.0).to(tl.float32)
    of_gain = tl.zeros([COLUMNS], tl.float32)
    of_columns = tl.zeros([COLUMNS], tl.int16 if NARROW else tl.int32)
    first = tl.program_id(0) * TILE
    for step in tl.range(tl.minimum(TILE, rows - first), num_stages=STAGES):
        row = (first + step).to(tl.int64)
        wide = tl.load(STREAM + row * columns + column, mask=within, other=0.0).to(tl.float32)
        grad = tl.load(OF_NORMED + row * of_normed_stride + column, mask=within, other=0.0).to(tl.float32)
        beside = tl.load(OF_STREAM + row * of_stream_stride + column, mask=within, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
        unit = wide * scale
        of_gain += grad * unit
        grad *= gain
        along = tl.sum(grad * unit, 0) / columns
        of_x = (beside + scale * (grad - unit * along)).to(OUT.dtype.element_ty)
        tl.store(OUT + row * columns + column, of_x, mask=within)
        bits = magnitudes(of_x, NARROW)
        of_columns = tl.maximum(of_columns, bits)
        tl.store(LARGEST + row, widened(tl.max(bits, 0), NARROW))
    tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * columns + column, of_gain, mask=within)
    tl.atomic_max(LARGEST + rows + column, widened(of_columns, NARROW), mask=within, sem="relaxed")


def _how(like: Tensor, loads: int, elements: int) -> dict[str, int]:
    """Return the constants and options of a launch that loads so many matrices."""
    rows, columns = len(like), triton.next_power_of_2(like.shape[1])
    tile = triton.next_power_of_2(min(MOST_ROWS, max(LEAST_ROWS, rows // PROGRAMS)))
    stages = min(STAGES, 1 + SHARED // (loads * columns * like.element_size()))
    how = {"TILE": tile, "COLUMNS": columns, "STAGES": stages, "NARROW": like.dtype == torch.bfloat16}
    return {**how, "num_warps": min(_MOST_WARPS, max(1, columns // (32 * elements)))}


def forward_how(like: Tensor) -> dict[str, int]:
    """Return the constants and options of the forward kernel."""
    return _how(like, 2, FORWARD_ELEMENTS)


def backward_how(like: Tensor) -> dict[str, int]:
    """Return the constants and options of the backward kernel."""
    return _how(like, 3, BACKWARD_ELEMENTS)


def add_norm_triton(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute add_norm_twin on a GPU. The norm is within its rounding, the others have its bits."""
    x, y = with_rows(x, y)
    stream, normed, _ = _add_norm_fake(x, y, gain, eps)
    (rows, columns), how = x.shape, forward_how(x)
    largest = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
    with on_device_of(x):
        add_norm_kernel[(ceil_div(rows, how["TILE"]),)](
            x, y, gain.contiguous(), stream, normed, largest, rows, columns, x.stride(0), y.stride(0), eps, **how
        )
    return stream, normed, largest


def add_norm_gradients_triton(
    of_stream: Tensor, of_normed: Tensor, stream: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute add_norm_gradients_twin on a GPU, within its rounding. The gain's gradient is added up in the same order
    always, and the largest magnitudes are exactly those of the result."""
    of_stream, of_normed = with_rows(of_stream, of_normed)
    (rows, columns), how = stream.shape, backward_how(stream)
    programs = ceil_div(rows, how["TILE"])
    of_x, of_gain = torch.empty_like(stream), torch.empty_like(gain)
    largest = torch.zeros(rows + columns, dtype=torch.int32, device=stream.device)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=stream.device)
    with on_device_of(stream):
        add_norm_gradients_kernel[(programs,)](
            of_stream, of_normed, stream, gain.contiguous(), of_x, partial, largest, rows, columns,
            of_stream.stride(0), of_normed.stride(0), eps, **how,
        )  # fmt: skip
        sum_rows(partial, of_gain)
    return of_x, of_gain, largest


def _add_norm_fake(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stream, normed = x.new_empty(x.shape), x.new_empty(x.shape)
    return stream, normed, x.new_empty(sum(x.shape), dtype=torch.int32)


def _add_norm_gradients_fake(
    of_stream: Tensor, of_normed: Tensor, stream: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, _, largest = _add_norm_fake(stream, stream, gain, eps)
    return of_x, gain.new_empty(gain.shape), largest


ADD_NORM = by_device("add_norm", add_norm_twin, add_norm_triton, _add_norm_fake)
ADD_NORM_GRADIENTS = by_device(
    "add_norm_gradients", add_norm_gradients_twin, add_norm_gradients_triton, _add_norm_gradients_fake
)
