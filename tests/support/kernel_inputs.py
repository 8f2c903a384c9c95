"""Inputs of the kernels around attention, and the errors of SwiGLU's gradients. Float64 is the judge."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sagekernels import backends
from sagekernels.call import Call, RecipeName
from sagekernels.router import router_logits
from sagekernels.testing import Shape


def rounding_errors(found: Tensor, exact: Tensor, float32: Tensor) -> float:
    """Return the largest error of `found`, in units of one rounding to its dtype plus the error that float32 before it
    allows."""
    last_place = torch.finfo(found.dtype)
    rounding = exact.abs() * (last_place.eps / 2) + last_place.smallest_normal * last_place.eps
    return ((found.double() - exact).abs() / (rounding + float32)).amax().item()


def cosine(value: Tensor, exact: Tensor) -> float:
    """Return the cosine similarity of two tensors taken as vectors."""
    return torch.nn.functional.cosine_similarity(value.double().flatten(), exact.double().flatten(), dim=0).item()


def call_of(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: str,
    *,
    scale: float | None = None,
    smooth_k: bool = True,
    sinks: Tensor | None = None,
) -> Call:
    """Make the call that a kernel gets for inputs of this shape."""
    scale = shape.head_dim**-0.5 if scale is None else scale
    return Call(q, k, v, shape.bounds(q.device), shape.causal, scale, smooth_k, recipe, None, sinks)


def random_swiglu(
    rows: int, columns: int, magnitude: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of silu(gate) * up, gate and up, [rows, columns] each. gate and up are views of one matrix.
    Some gates are at the ends of the sigmoid, ±80 and ±200, and some up are 0."""
    draw = torch.Generator(device).manual_seed(rows)
    grad, gate, up = (torch.randn(rows, columns, generator=draw, device=device) for _ in range(3))
    gate, up, grad = 3 * gate, magnitude * up, magnitude * grad
    ends = torch.tensor([80.0, -80.0, 200.0, -200.0, 0.0], device=device)
    gate[::7] = ends.repeat(columns // 5 + 1)[:columns]
    up[:, columns // 3 :: 50] = 0
    gate, up = torch.cat((gate, up), 1).to(dtype).split(columns, 1)
    return grad.to(dtype), gate, up


def swiglu_gradients_error(found: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> float:
    """Return the largest error of the gradients of gate and up, side by side, against float64. The unit is what one
    rounding and float32 before it allow, so 1 is the limit. NaN if any is."""
    grad64, x, up64 = grad.double(), gate.double(), up.double()
    sigmoid = x.sigmoid()
    exact = torch.cat((grad64 * up64 * sigmoid * (1 + x * (1 - sigmoid)), grad64 * x * sigmoid), 1)
    # float32 errs by some last places of the terms, and of e^-x by more the larger x is. It has no sigmoid below 1e-37.
    # Where a product is subnormal it errs by last places of 2^-149, before 1 + x (1 - sigmoid) multiplies it.
    steps = (4e-7 * sigmoid + 1e-37) * (1 + x.abs() * (1 - sigmoid))
    of_gate = ((grad64 * up64).abs() * steps + 2**-149) * (1 + x.abs())
    float32 = torch.cat((of_gate, (grad64 * x).abs() * steps + 2**-149), 1)
    return rounding_errors(found, exact, float32)


def _of_gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _of_gpt_oss,
}
"""The activations of experts as torch has them, by name."""


def random_norm(
    rows: int, columns: int, magnitude: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return x, y, the gradients of x + y and of its norm, [rows, columns] each, and a gain. Rows and columns have
    magnitudes of their own. Every seventh row of x + y is zeros."""
    draw = torch.Generator(device).manual_seed(rows)
    spread = torch.exp2(torch.randn(rows, 1, generator=draw, device=device)) * magnitude
    x, y, of_stream, of_normed = (torch.randn(rows, columns, generator=draw, device=device) * spread for _ in range(4))
    y[1::7] = -x[1::7]
    gain = 1 + 0.5 * torch.randn(columns, generator=draw, device=device)
    return (*(tensor.to(dtype) for tensor in (x, y, of_stream, of_normed, gain)),)


def add_norm_errors(
    inputs: Sequence[Tensor], eps: float, made: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[float]:
    """Return the largest errors of x + y, of its norm, of the gradient of x and of that of the gain, against float64.
    The unit is what one rounding and float32 before it allow, so 1 is the limit. NaN if any is."""
    x, y, of_stream, of_normed, gain = (tensor.double() for tensor in inputs)
    wide = made[0].double()
    scale = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    unit, grad = wide * scale, of_normed * gain
    normed, along = unit * gain, (grad * unit).mean(1, keepdim=True)
    of_x, terms = of_stream + scale * (grad - unit * along), (grad * unit).abs().mean(1, keepdim=True)
    terms = of_stream.abs() + scale * (grad.abs() + unit.abs() * terms)
    products, last = of_normed * unit, 1e-6
    return [
        rounding_errors(made[0], x + y, last * (x + y).abs()),
        rounding_errors(made[1], normed, last * normed.abs()),
        rounding_errors(gradients[0], of_x, last * terms),
        rounding_errors(gradients[1], products.sum(0), last * products.abs().sum(0)),
    ]


def random_choices(loads: Sequence[int], top: int, device: torch.device | str = "cpu") -> Tensor:
    """Return choices [T, top] of so few tokens as possible, of which each expert has its load. A token's choices are
    different, in no order. Where the loads leave places over they are -1, as experts of another rank."""
    total = sum(loads)
    tokens = max(-(-total // top), *loads)
    draw = torch.Generator().manual_seed(total)
    flat = torch.full((top * tokens,), -1)
    flat[:total] = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))
    choices = flat.view(top, tokens).t()[torch.randperm(tokens, generator=draw)]
    return choices.gather(1, torch.rand(choices.shape, generator=draw).argsort(1)).to(device)


def chunk_bounds(
    queries: int, keys: int, documents: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> Tensor:
    """Return the bounds of sage_attention where each row holds some sequences, of which `queries` last tokens of the
    first `keys` are queries.

    Args:
        documents: the lengths of the documents of each sequence. They add up to `keys`.
    """
    i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    blocks = []
    for lengths in documents:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        blocks.append((document[i] == document[j]) & (j <= i))
    seen = torch.block_diag(*(block.float() for block in blocks)).int()
    found = []
    for axis in (1, 0):
        starts, count = seen.argmax(axis), seen.sum(axis)
        ends = (starts + count).cummax(0).values
        found.append(torch.stack((torch.where(count > 0, starts, ends), ends)))  # No query sees some of the keys.
    return torch.cat(found, 1).int().to(device)


def takes(backend: str, shape: Shape, dtype: torch.dtype, recipe: RecipeName) -> bool:
    """Return whether a backend has kernels for a call. Triton computes what the others do not take."""
    one, heads = backends.NAMED[backend], ((shape.heads, shape.n_q), *[(shape.kv_heads, shape.n_k)] * 2)
    q, k, v = (torch.empty(shape.batch, n, h, shape.head_dim, dtype=dtype, device="meta") for h, n in heads)
    return shape.head_dim in one.head_dims and one.takes(call_of(shape, q, k, v, recipe))


def router_results(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the logits of a router, and the gradients of its tokens and its weight."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    logits = router_logits(*leaves)
    return [logits.detach(), *torch.autograd.grad(logits, leaves, grad)]
