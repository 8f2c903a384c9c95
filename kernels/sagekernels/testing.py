"""Inputs and error metrics that tests, the accuracy tables, admission and the benchmark share. Float64 is the judge."""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call
from .reference import attention_reference, document_bounds, one_document


class Shape(NamedTuple):
    """The sizes of one attention problem. `documents` are the lengths of the documents packed in a row (batch 1). It is
    empty for none."""

    batch: int = 1
    n_q: int = 256
    n_k: int = 256
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = True
    documents: tuple[int, ...] = ()
    window: int | None = None
    sinks: bool = False

    def __str__(self) -> str:
        packed = f" docs{len(self.documents)}" if self.documents else ""
        packed += f" window{self.window}" * bool(self.window) + " sinks" * self.sinks
        kind = "causal" if self.causal else "full"
        n = f"{self.n_q}" if self.n_q == self.n_k else f"{self.n_q}x{self.n_k}"
        return f"B{self.batch} N{n} H{self.heads}/{self.kv_heads} D{self.head_dim} {kind}{packed}"

    def cu_seqlens(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return int32 [documents + 1], or None."""
        if not self.documents:
            return None
        return torch.tensor([0, *self.documents], device=device).cumsum(0).to(torch.int32)

    def bounds(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return document_bounds of cu_seqlens and the window, or None."""
        if not self.documents and self.window is None:
            return None
        cu_seqlens = self.cu_seqlens(device) if self.documents else one_document(self.n_q, device)
        return document_bounds(cu_seqlens, self.n_q, self.window)


def rounding_errors(found: Tensor, exact: Tensor, float32: Tensor) -> float:
    """Return the largest error of `found`, in units of one rounding to its dtype plus the error that float32 before it
    allows."""
    last_place = torch.finfo(found.dtype)
    rounding = exact.abs() * (last_place.eps / 2) + last_place.smallest_normal * last_place.eps
    return ((found.double() - exact).abs() / (rounding + float32)).amax().item()


class QKInputs(NamedTuple):
    """The inputs of the gradients of QK-norm with rotary embedding, in the operator's order. Those of the forward begin
    at q."""

    of_q: Tensor
    of_k: Tensor
    of_v: Tensor
    q: Tensor
    k: Tensor
    q_gain: Tensor
    k_gain: Tensor
    cos: Tensor
    sin: Tensor
    eps: float = 1e-6


def random_qk(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    magnitude: float,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> QKInputs:
    """Draw the inputs of QK-norm with rotary embedding. heads: the numbers of heads of q and of k. q and k are views of
    one projection's output. Tokens lie anywhere in a long context; some of them are zeros, and others are near
    1e-30."""
    draw = torch.Generator(device).manual_seed(tokens)
    query, key = (n * head_dim for n in heads)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=device)

    y = magnitude * normal(tokens, query + 2 * key) * torch.exp2(normal(tokens, 1))
    y[1::7], y[2::7] = 0, 1e-30 * y[2::7]
    largest = min(torch.finfo(dtype).max, torch.finfo(y.dtype).max) / 2
    q, k, _ = y.clamp(-largest, largest).to(dtype).split([query, key, key], 1)
    grads = (normal(tokens, n, head_dim).to(dtype) for n in (heads[0], heads[1], heads[1]))
    gains = (1 + 0.5 * normal(2, head_dim)).to(dtype)
    place = torch.randint(100_000, (tokens, 1), generator=draw, device=device)
    angles = place * 10_000.0 ** (-torch.arange(head_dim // 2, device=device, dtype=torch.float64) * 2 / head_dim)
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
    return QKInputs(*grads, q, k, *gains, cos, sin)


def qk_norm_rope_errors(results: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor], x: QKInputs) -> list[float]:
    """Return the largest errors of qk_norm_rope and its gradients for `x`, against float64: those of q, k, their
    gradients, the gains' gradients, and v's. The unit is what one rounding and float32 before it allow, so 1 is the
    limit. NaN if any is."""
    sides = (x.q, x.of_q, x.q_gain, results[0]), (x.k, x.of_k, x.k_gain, results[1])
    query, key = x.q.shape[1], x.k.shape[1]
    *of_x, of_v = gradients[0].split([query, key, key], 1)
    errors, cos, sin = [], x.cos.double(), x.sin.double()

    def turned(a: Tensor, b: Tensor, sine: Tensor) -> Tensor:
        return torch.cat((a * cos - b * sine, b * cos + a * sine), -1)

    def terms(a: Tensor, b: Tensor) -> Tensor:
        """Return the magnitudes that `turned` adds up. float32 errs by some last places of these."""
        cosine, sine = cos.abs(), sin.abs()
        return torch.cat((a.abs() * cosine + b.abs() * sine, b.abs() * cosine + a.abs() * sine), -1)

    for (rows, of_y, narrow_gain, y), gradient, of_gain in zip(sides, of_x, gradients[1], strict=True):
        gain = narrow_gain.double()
        heads = rows.double().unflatten(1, (-1, len(gain)))
        r = (heads.square().mean(-1, keepdim=True) + x.eps).rsqrt()
        unit = heads * r
        halves, of_halves = (unit * gain).chunk(2, -1), of_y.double().chunk(2, -1)
        errors.append(rounding_errors(y, turned(*halves, sin), 2e-6 * terms(*halves)))
        u, magnitudes = turned(*of_halves, -sin), terms(*of_halves)
        w = u * gain
        exact = r * (w - unit * (w * unit).mean(-1, keepdim=True))
        w = magnitudes * gain.abs()
        steps = 2e-6 * r * (w + unit.abs() * (w * unit.abs()).mean(-1, keepdim=True))
        errors.append(rounding_errors(gradient, exact.flatten(1), steps.flatten(1)))
        steps = 4e-6 * (magnitudes * unit.abs()).sum((0, 1))
        errors.append(rounding_errors(of_gain, (u * unit).sum((0, 1)), steps))
    errors.append(0.0 if torch.equal(of_v, x.of_v.flatten(1)) else float("inf"))
    return errors


class Results(NamedTuple):
    """The output and gradients of one attention call."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class SinkResults(NamedTuple):
    """The results of attention with sinks."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor


def random_inputs(
    shape: Shape,
    *,
    sigma: float = 1.0,
    k_mean: float = 0.0,
    do_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k (std sigma; k shifted per channel by normal numbers of std k_mean), v (std 1), do (std do_scale)."""
    g = torch.Generator(device).manual_seed(seed)
    b, d = shape.batch, shape.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    q = normal(b, shape.n_q, shape.heads, d) * sigma
    k = normal(b, shape.n_k, shape.kv_heads, d) * sigma + normal(1, 1, shape.kv_heads, d) * k_mean
    v = normal(b, shape.n_k, shape.kv_heads, d)
    do = normal(b, shape.n_q, shape.heads, d) * do_scale
    return q.to(dtype), k.to(dtype), v.to(dtype), do.to(dtype)


def random_sinks(shape: Shape, *, device: torch.device | str = "cpu", seed: int = 0) -> Tensor | None:
    """Draw sinks from 0 to 6, float32 [H], or return None if the shape has none. Inputs beside them need a mean of K
    (random_inputs(k_mean=2.0)): without one the shift of a sink would go untested."""
    if not shape.sinks:
        return None
    return 6 * torch.rand(shape.heads, generator=torch.Generator(device).manual_seed(seed), device=device)


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


def exact_results(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, sinks: Tensor | None = None, **options
) -> Results | SinkResults:
    """Compute attention_reference and its gradients in float64."""
    wide = (x.double() for x in (q, k, v, do))
    return results_of(attention_reference, *wide, sinks=None if sinks is None else sinks.double(), **options)


def results_of(
    attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, sinks: Tensor | None = None, **options
) -> Results | SinkResults:
    """Compute the output and gradients of `attention(q, k, v, **options)`: Results, or SinkResults if it gets sinks."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if sinks is None:
        o = attention(*leaves, **options)
        return Results(o.detach(), *torch.autograd.grad(o, leaves, do))
    own = sinks.detach().requires_grad_()
    o = attention(*leaves, sinks=own, **options)
    return SinkResults(o.detach(), *torch.autograd.grad(o, (*leaves, own), do))


def rel_l2(value: Tensor, exact: Tensor) -> float:
    """Return ||value - exact|| / ||exact||; NaN where value is, 0 where both vanish."""
    value, exact = value.double(), exact.double()
    error, size = (value - exact).norm().item(), exact.norm().item()
    return error if error == 0.0 or error != error else error / size if size > 0 else float("inf")


def cosine(value: Tensor, exact: Tensor) -> float:
    """Return the cosine similarity of two tensors taken as vectors."""
    return torch.nn.functional.cosine_similarity(value.double().flatten(), exact.double().flatten(), dim=0).item()


def errors(value: Results | SinkResults, exact: Results | SinkResults) -> dict[str, float]:
    """Return rel_l2 of o and the gradients by name."""
    return {name: rel_l2(a, b) for name, a, b in zip(value._fields, value, exact, strict=True)}
