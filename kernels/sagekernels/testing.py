"""Inputs and error metrics that the accuracy tables, admission, the benchmark and tests share. Float64 is the judge."""

from typing import NamedTuple

import torch
from torch import Tensor

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


def errors(value: Results | SinkResults, exact: Results | SinkResults) -> dict[str, float]:
    """Return rel_l2 of o and the gradients by name."""
    return {name: rel_l2(a, b) for name, a, b in zip(value._fields, value, exact, strict=True)}
