"""Inputs of QK-norm with rotary embedding, and the errors of its results. Float64 is the judge."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_inputs import rounding_errors


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
