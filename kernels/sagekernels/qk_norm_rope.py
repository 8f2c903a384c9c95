"""QK-norm, then the rotary embedding, of q and k in one pass each way: the torch twin, then Triton.

torch.compile makes one kernel forward and three backward of this, for q and for k each. Here forward reads q and k once
and writes the inputs of attention. Backward reads them and the gradients once and writes one matrix: the whole gradient
of the projection that q, k and v came from, with that of v copied into it. A matmul that reads it as one matrix joins
nothing, and the three gradients are views of it.

All is computed in float32 and rounded once, to the result. Nothing is written between norm and rotation, so the
rounding that two steps of torch have there falls away, both ways. The gains' gradients are sums over tokens and heads.
Each program adds in a fixed order, and the programs' sums are added in a fixed order, so the bits are always the same.

With x = (a, b), the halves of a head, r = rsqrt(mean(x^2) + eps) and n = x r gain:

    forward     y = n_a cos - n_b sin, n_b cos + n_a sin
    backward    u = dy_a cos + dy_b sin, dy_b cos - dy_a sin;  dgain = sum(u x r);  w = u gain
                dx = r (w - x r mean(w x r))
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .call import Gradients, Projection, ProjectionGradients
from .casts import DTYPES
from .launch import on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms

# A program has so many elements of the halves of heads in hand at a time, and so many warps. These are 16 heads of 128
# forward and 4 backward. The backward program takes BACKWARD_TOKENS tokens one after the other and leaves one partial
# sum of the gains' gradients. These values are not yet timed (results/log/kernels.md has a trial).
FORWARD_ELEMENTS, FORWARD_WARPS = 1024, 4
BACKWARD_ELEMENTS, BACKWARD_WARPS, BACKWARD_TOKENS = 256, 1, 16
# A program adds so many rows of partial sums at a time, in so many columns. The values are not yet timed.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 1024, 8, 8


def _in_float32(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [tokens, heads head_dim] by heads, 1 / rms of each head, and the gain, in float32. float64 stays."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.to(wide).unflatten(-1, (-1, len(gain)))
    return heads, torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps), gain.to(wide)


def _norm_rope_twin(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    heads, r, wide_gain = _in_float32(x, gain, eps)
    a, b = (heads * r * wide_gain).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qk_norm_rope_twin(
    q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute q and k, normalized and rotated, [tokens, heads, head_dim] each, in float32, rounded once."""
    return _norm_rope_twin(q, q_gain, cos, sin, eps), _norm_rope_twin(k, k_gain, cos, sin, eps)


def _norm_rope_gradients_twin(
    grad: Tensor, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [tokens, heads head_dim] and of the gain."""
    heads, r, wide_gain = _in_float32(x, gain, eps)
    a, b = grad.to(heads.dtype).chunk(2, -1)
    u, unit = torch.cat((a * cos + b * sin, b * cos - a * sin), -1), heads * r
    w = u * wide_gain
    of_x = r * (w - unit * (w * unit).mean(-1, keepdim=True))
    return of_x.flatten(1).to(x.dtype), (u * unit).sum((0, 1)).to(gain.dtype)


def qk_norm_rope_gradients_twin(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v side by side, [tokens, (heads + 2 kv_heads) head_dim], and of the gains, [2,
    head_dim]."""
    x_q, gain_q = _norm_rope_gradients_twin(of_q, q, q_gain, cos, sin, eps)
    x_k, gain_k = _norm_rope_gradients_twin(of_k, k, k_gain, cos, sin, eps)
    return torch.cat((x_q, x_k, of_v.flatten(1)), 1), torch.stack((gain_q, gain_k))


@triton.jit
def _halves(BASE, head, half, HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_STRIDE):
    """Return the addresses of the halves of some heads, and which of the heads exist. The offsets have 64 bits, because
    heads may be all tokens apart."""
    first = BASE + head[:, None].to(tl.int64) * HEAD_STRIDE + half[None, :]
    return first, first + HALF, (head < HEADS)[:, None] & (half < HALF)[None, :]


@triton.jit
def _load(pointers, inside):
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _one_over_rms(a, b, eps, HALF: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]


@triton.jit
def gradients_of_rows(a, b, of_a, of_b, cos, sin, gain_a, gain_b, eps, HALF: tl.constexpr):
    """Return the gradients of the halves of some heads, from those of what became of them, and what each head adds to
    the gain's."""
    r = _one_over_rms(a, b, eps, HALF)
    a, b = a * r, b * r
    u_a, u_b = of_a * cos + of_b * sin, of_b * cos - of_a * sin
    gain_sum_a, gain_sum_b = u_a * a, u_b * b
    u_a, u_b = u_a * gain_a, u_b * gain_b
    mean = ((tl.sum(u_a * a, 1) + tl.sum(u_b * b, 1)) / (2 * HALF))[:, None]
    return r * (u_a - a * mean), r * (u_b - b * mean), gain_sum_a, gain_sum_b


@triton.jit
def _rotated_heads(
    X, GAIN, COS, SIN, OUT, token, stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Write the heads of one token, BLOCK_HEADS at a time."""
    half = tl.arange(0, BLOCK_HALF)
    there = half < HALF
    gain_a, gain_b = _load(GAIN + half, there)[None, :], _load(GAIN + HALF + half, there)[None, :]
    cos = _load(COS + token * HALF + half, there)[None, :]
    sin = _load(SIN + token * HALF + half, there)[None, :]
    for first in range(0, HEADS, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        x_a, x_b, inside = _halves(X + token * stride, head, half, HEADS, HALF, 2 * HALF)
        a, b = _load(x_a, inside), _load(x_b, inside)
        r = _one_over_rms(a, b, eps, HALF)
        a, b = a * r * gain_a, b * r * gain_b
        out_a, out_b, _ = _halves(OUT + token * (HEADS * 2 * HALF), head, half, HEADS, HALF, 2 * HALF)
        tl.store(out_a, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(out_b, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _qk_norm_rope_kernel(
    Q, K, Q_GAIN, K_GAIN, COS, SIN, Q_OUT, K_OUT, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate all heads of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    _rotated_heads(Q, Q_GAIN, COS, SIN, Q_OUT, token, q_stride, eps, Q_HEADS, HALF, BLOCK_HALF, BLOCK_Q)
    _rotated_heads(K, K_GAIN, COS, SIN, K_OUT, token, k_stride, eps, K_HEADS, HALF, BLOCK_HALF, BLOCK_K)


@triton.jit
def _gradients_of_heads(
    GRAD, X, GAIN, COS, SIN, OUT, PARTIAL, start, tokens, grad_stride, grad_head_stride, stride, out_stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of TOKENS tokens from `start` on, and into PARTIAL their sums for the gain."""
    half = tl.arange(0, BLOCK_HALF)
    there = half < HALF
    gain_a, gain_b = _load(GAIN + half, there)[None, :], _load(GAIN + HALF + half, there)[None, :]
    sum_a = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    sum_b = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    for token in range(start, tl.minimum(start + TOKENS, tokens)):
        cos = _load(COS + token * HALF + half, there)[None, :]
        sin = _load(SIN + token * HALF + half, there)[None, :]
        for first in range(0, HEADS, BLOCK_HEADS):
            head = first + tl.arange(0, BLOCK_HEADS)
            x_a, x_b, inside = _halves(X + token * stride, head, half, HEADS, HALF, 2 * HALF)
            of_a, of_b, _ = _halves(GRAD + token * grad_stride, head, half, HEADS, HALF, grad_head_stride)
            a, b, gain_sum_a, gain_sum_b = gradients_of_rows(
                _load(x_a, inside), _load(x_b, inside), _load(of_a, inside), _load(of_b, inside),
                cos, sin, gain_a, gain_b, eps, HALF,
            )  # fmt: skip
            sum_a += gain_sum_a
            sum_b += gain_sum_b
            out_a, out_b, _ = _halves(OUT + token * out_stride, head, half, HEADS, HALF, 2 * HALF)
            tl.store(out_a, a.to(OUT.dtype.element_ty), mask=inside)
            tl.store(out_b, b.to(OUT.dtype.element_ty), mask=inside)
    tl.store(PARTIAL + half, tl.sum(sum_a, 0), mask=there)
    tl.store(PARTIAL + HALF + half, tl.sum(sum_b, 0), mask=there)


@triton.jit
def _qk_norm_rope_gradients_kernel(
    OF_Q, OF_K, OF_V, Q, K, Q_GAIN, K_GAIN, COS, SIN, OUT, PARTIAL, tokens,
    of_q_stride, of_q_head, of_k_stride, of_k_head, of_v_stride, of_v_head, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of all heads of TOKENS tokens per program. q comes first, so the tables come from the
    caches for k."""
    program = tl.program_id(0).to(tl.int64)
    start, out_stride = program * TOKENS, (Q_HEADS + 2 * K_HEADS) * 2 * HALF
    PARTIAL += program * (4 * HALF)
    _gradients_of_heads(
        OF_Q, Q, Q_GAIN, COS, SIN, OUT, PARTIAL, start, tokens, of_q_stride, of_q_head, q_stride, out_stride, eps,
        Q_HEADS, HALF, BLOCK_HALF, BLOCK_Q, TOKENS,
    )  # fmt: skip
    OUT += Q_HEADS * 2 * HALF
    _gradients_of_heads(
        OF_K, K, K_GAIN, COS, SIN, OUT, PARTIAL + 2 * HALF, start, tokens, of_k_stride, of_k_head, k_stride, out_stride,
        eps, K_HEADS, HALF, BLOCK_HALF, BLOCK_K, TOKENS,
    )  # fmt: skip
    OUT += K_HEADS * 2 * HALF
    half = tl.arange(0, BLOCK_HALF)
    for token in range(start, tl.minimum(start + TOKENS, tokens)):
        for first in range(0, K_HEADS, BLOCK_K):
            head = first + tl.arange(0, BLOCK_K)
            of_a, of_b, inside = _halves(OF_V + token * of_v_stride, head, half, K_HEADS, HALF, of_v_head)
            out_a, out_b, _ = _halves(OUT + token * out_stride, head, half, K_HEADS, HALF, 2 * HALF)
            tl.store(out_a, tl.load(of_a, mask=inside), mask=inside)
            tl.store(out_b, tl.load(of_b, mask=inside), mask=inside)


@triton.jit
def _sum_rows_kernel(X, OUT, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add COLUMNS columns of a contiguous float32 matrix up, always in the same order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(X + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(OUT + column, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=column < columns)


@functools.cache
def _blocks(elements: int, query: int, key: int, head_dim: int) -> dict[str, int]:
    """Return the constants of both kernels for columns of q and of k. They are kept to save time on the host."""
    half = head_dim // 2
    block_half = triton.next_power_of_2(half)
    heads = {"Q": query // head_dim, "K": key // head_dim}
    at_once = {name: min(triton.next_power_of_2(n), max(1, elements // block_half)) for name, n in heads.items()}
    of_heads = {f"{name}_HEADS": n for name, n in heads.items()} | {f"BLOCK_{name}": n for name, n in at_once.items()}
    return {**of_heads, "HALF": half, "BLOCK_HALF": block_half}


def with_rows(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the last dim in one piece."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def sum_rows(x: Tensor, out: Tensor) -> Tensor:
    """Add the rows of a float32 matrix up, into a tensor of as many elements as it has columns, which is returned."""
    rows, columns = x.shape
    _sum_rows_kernel[(triton.cdiv(columns, SUM_COLUMNS),)](
        x, out, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
    )
    return out


def qk_norm_rope_triton(
    q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute qk_norm_rope_twin on a GPU, within its rounding."""
    q, k = with_rows(q, k)
    out = _qk_norm_rope_fake(q, k, q_gain, k_gain, cos, sin, eps)
    blocks = _blocks(FORWARD_ELEMENTS, q.shape[1], k.shape[1], len(q_gain))
    with on_device_of(q):
        _qk_norm_rope_kernel[(len(q),)](
            q, k, q_gain.contiguous(), k_gain.contiguous(), cos.contiguous(), sin.contiguous(), *out,
            q.stride(0), k.stride(0), eps, **blocks, num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return out


def qk_norm_rope_gradients_triton(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute qk_norm_rope_gradients_twin on a GPU, within its rounding."""
    of_q, of_k, of_v, q, k = with_rows(of_q, of_k, of_v, q, k)
    out, of_gains = _qk_norm_rope_gradients_fake(of_q, of_k, of_v, q, k, q_gain, k_gain, cos, sin, eps)
    programs, columns = triton.cdiv(len(q), BACKWARD_TOKENS), 2 * len(q_gain)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=q.device)
    blocks = _blocks(BACKWARD_ELEMENTS, q.shape[1], k.shape[1], len(q_gain))
    strides = [x.stride(dim) for x in (of_q, of_k, of_v) for dim in (0, 1)]
    with on_device_of(q):
        _qk_norm_rope_gradients_kernel[(programs,)](
            of_q, of_k, of_v, q, k, q_gain.contiguous(), k_gain.contiguous(), cos.contiguous(), sin.contiguous(),
            out, partial, len(q), *strides, q.stride(0), k.stride(0), eps,
            **blocks, TOKENS=BACKWARD_TOKENS, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
        sum_rows(partial, of_gains)
    return out, of_gains


def _qk_norm_rope_fake(
    q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    head_dim = q_gain.shape[0]
    q_out, k_out = (x.new_empty(x.shape[0], x.shape[1] // head_dim, head_dim) for x in (q, k))
    return q_out, k_out


def _qk_norm_rope_gradients_fake(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[1] + 2 * k.shape[1]), q_gain.new_empty(2, q_gain.shape[0])


QK_NORM_ROPE = by_device("qk_norm_rope", qk_norm_rope_twin, qk_norm_rope_triton, _qk_norm_rope_fake)
QK_NORM_ROPE_GRADIENTS = by_device(
    "qk_norm_rope_gradients", qk_norm_rope_gradients_twin, qk_norm_rope_gradients_triton, _qk_norm_rope_gradients_fake
)


def projection_gradients(grads: Gradients, projection: Projection) -> ProjectionGradients:
    """Compute the gradients of a projection from those of an attention call, [B, N, heads, D] each."""
    of_q, of_k, of_v = (x.flatten(0, 1) for x in grads)
    return QK_NORM_ROPE_GRADIENTS(of_q, of_k, of_v, *projection)


_NAMED = "qk_norm_rope", "F.rms_norm and the rotation in torch"


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor,
        cos: Tensor, sin: Tensor, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(q, k, q_gain, k_gain, cos, sin)
        ctx.eps = eps
        return *QK_NORM_ROPE(q, k, q_gain, k_gain, cos, sin, eps), v.unflatten(-1, (-1, len(q_gain)))

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *rest = ctx.saved_tensors
        of_qkv, of_gains = QK_NORM_ROPE_GRADIENTS(*grads, q, k, *rest, ctx.eps)
        # The split names the sizes, because torch.compile then knows that the pieces, joined again, are the whole.
        of_q, of_k, of_v = of_qkv.split([q.shape[1], k.shape[1], k.shape[1]], 1)
        return of_q, of_k, of_v, *of_gains.unbind(), None, None, None


def qk_norm_rope(
    q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of q and k, each divided by its root mean square, times a gain, then rotated; and those of v.

    Dim i is rotated together with dim i + head_dim / 2 (Llama's convention). The gradients of q, k and v are views of
    one matrix, side by side. q, k, gains and tables are kept for the backward pass.

    Args:
        q: [tokens, heads * head_dim], bf16, fp16 or fp32, without a GPU also float64; any strides.
        k: [tokens, kv_heads * head_dim] in the dtype of q.
        v: as k.
        q_gain: [head_dim]; the dtype need not be that of q.
        k_gain: as q_gain.
        cos: fp32 [tokens, 1, head_dim / 2], the cosines of the rotation angles. They get no gradient.
        sin: as cos, the sines.
        eps: added to the mean square.

    Returns:
        [tokens, heads, head_dim] of q, [tokens, kv_heads, head_dim] of k, contiguous; that of v, a view.

    Raises:
        TypeError: another dtype.
        ValueError: shapes or dtypes that do not fit together, or an odd head_dim.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    refuse_transforms(*_NAMED)
    check_projection(q, k, v, q_gain, k_gain, cos, sin)
    rotated_q, rotated_k, heads_of_v = _QKNormRope.apply(q, k, v, q_gain, k_gain, cos, sin, eps)
    return rotated_q, rotated_k, heads_of_v


def check_projection(q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise TypeError or ValueError on inputs that qk_norm_rope does not take."""
    dtypes = DTYPES if q.is_cuda else (*DTYPES, torch.float64)
    if not {q.dtype, q_gain.dtype} <= set(dtypes) or {cos.dtype, sin.dtype} != {torch.float32}:
        raise TypeError(
            f"qk_norm_rope takes bf16, fp16 or fp32, and tables in fp32, got q in {q.dtype}, gains in {q_gain.dtype}, "
            f"tables in {cos.dtype} and {sin.dtype}"
        )
    tokens, head_dim = q.shape[0], q_gain.shape[0]
    of_one_dtype = q.dtype == k.dtype == v.dtype and q_gain.dtype == k_gain.dtype
    matrices = all(x.dim() == 2 and x.shape[0] == tokens and x.shape[1] % head_dim == 0 for x in (q, k, v))
    table = (tokens, 1, head_dim // 2)
    fit = q_gain.shape == k_gain.shape == (head_dim,) and cos.shape == sin.shape == table
    if not (of_one_dtype and matrices and k.shape == v.shape and fit) or head_dim % 2:
        named = {"q": q, "k": k, "v": v, "q_gain": q_gain, "k_gain": k_gain, "cos": cos, "sin": sin}
        found = ", ".join(f"{name} {tuple(x.shape)} in {x.dtype}" for name, x in named.items())
        raise ValueError(
            "qk_norm_rope takes q [tokens, heads x head_dim], k and v [tokens, kv_heads x head_dim] of one dtype, "
            f"gains [head_dim] of one dtype, head_dim even, and tables [tokens, 1, head_dim / 2], got {found}"
        )
