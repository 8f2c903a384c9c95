"""Inputs and error metrics that tests, the accuracy tables, admission and the benchmark share. Float64 is the judge."""

from typing import NamedTuple

import torch
from torch import Tensor

from .reference import attention_reference, document_bounds


class Shape(NamedTuple):
    """One attention problem. `documents` are the lengths of the documents packed in a row (batch 1), empty for none."""

    batch: int = 1
    n_q: int = 256
    n_k: int = 256
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = True
    documents: tuple[int, ...] = ()

    def __str__(self) -> str:
        packed = f" docs{len(self.documents)}" if self.documents else ""
        kind = "causal" if self.causal else "full"
        n = f"{self.n_q}" if self.n_q == self.n_k else f"{self.n_q}x{self.n_k}"
        return f"B{self.batch} N{n} H{self.heads}/{self.kv_heads} D{self.head_dim} {kind}{packed}"

    def cu_seqlens(self, device: torch.device | str = "cpu") -> Tensor | None:
        """int32 [documents + 1], or None."""
        if not self.documents:
            return None
        return torch.tensor([0, *self.documents], device=device).cumsum(0).to(torch.int32)

    def bounds(self, device: torch.device | str = "cpu") -> Tensor | None:
        """document_bounds of cu_seqlens."""
        return document_bounds(self.cu_seqlens(device), self.n_q) if self.documents else None


def random_swiglu(
    rows: int, columns: int, magnitude: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of silu(gate) * up, gate and up, [rows, columns] each, the latter views of one matrix. Some gates are at
    the ends of the sigmoid, +-80 and +-200, some up are 0."""
    draw = torch.Generator(device).manual_seed(rows)
    grad, gate, up = (torch.randn(rows, columns, generator=draw, device=device) for _ in range(3))
    gate, up, grad = 3 * gate, magnitude * up, magnitude * grad
    ends = torch.tensor([80.0, -80.0, 200.0, -200.0, 0.0], device=device)
    gate[::7] = ends.repeat(columns // 5 + 1)[:columns]
    up[:, columns // 3 :: 50] = 0
    gate, up = torch.cat((gate, up), 1).to(dtype).split(columns, 1)
    return grad.to(dtype), gate, up


def swiglu_gradients_error(found: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> float:
    """How far gradients of silu(gate) * up, gate's and up's side by side, are from float64's at most, over what one
    rounding and float32 before it allow: 1 is the limit. NaN if any is."""
    grad64, x, up64 = grad.double(), gate.double(), up.double()
    sigmoid = x.sigmoid()
    exact = torch.cat((grad64 * up64 * sigmoid * (1 + x * (1 - sigmoid)), grad64 * x * sigmoid), 1)
    # Of float32: some last places of the terms, more of e^-x the larger x is, and no sigmoid below 1e-37.
    steps = (4e-7 * sigmoid + 1e-37) * (1 + x.abs() * (1 - sigmoid))
    float32 = torch.cat(((grad64 * up64).abs() * steps * (1 + x.abs()), (grad64 * x).abs() * steps), 1)
    last_place = torch.finfo(found.dtype)
    rounding = exact.abs() * (last_place.eps / 2) + last_place.smallest_normal * last_place.eps
    return ((found.double() - exact).abs() / (rounding + float32)).amax().item()


class Results(NamedTuple):
    """Output and gradients of one attention call."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


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
    """q, k (std sigma; k shifted per channel by normal numbers of std k_mean), v (std 1), do (std do_scale)."""
    g = torch.Generator(device).manual_seed(seed)
    b, d = shape.batch, shape.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    q = normal(b, shape.n_q, shape.heads, d) * sigma
    k = normal(b, shape.n_k, shape.kv_heads, d) * sigma + normal(1, 1, shape.kv_heads, d) * k_mean
    v = normal(b, shape.n_k, shape.kv_heads, d)
    do = normal(b, shape.n_q, shape.heads, d) * do_scale
    return q.to(dtype), k.to(dtype), v.to(dtype), do.to(dtype)


def exact_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options) -> Results:
    """attention_reference and its gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = attention_reference(*leaves, **options)
    return Results(o.detach(), *torch.autograd.grad(o, leaves, do.double()))


def results_of(attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options) -> Results:
    """Output and gradients of `attention(q, k, v, **options)`."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, **options)
    return Results(o.detach(), *torch.autograd.grad(o, leaves, do))


def rel_l2(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact||; NaN where value is, 0 where both vanish."""
    value, exact = value.double(), exact.double()
    error, size = (value - exact).norm().item(), exact.norm().item()
    return error if error == 0.0 or error != error else error / size if size > 0 else float("inf")


def cosine(value: Tensor, exact: Tensor) -> float:
    """Cosine similarity of two tensors taken as vectors."""
    return torch.nn.functional.cosine_similarity(value.double().flatten(), exact.double().flatten(), dim=0).item()


def errors(value: Results, exact: Results) -> dict[str, float]:
    """rel_l2 of o, dq, dk and dv by name."""
    return {name: rel_l2(a, b) for name, a, b in zip(Results._fields, value, exact, strict=True)}
