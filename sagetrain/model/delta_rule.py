"""The recurrence and the short convolution of a gated delta net (arXiv 2412.06464): in plain torch, and by the package
fla. Each is a value, and `delta_rule` says which one runs.

Shape letters: B sequences, S tokens of a sequence, C channels, L tokens of a convolution, H heads of q and k, N heads
of v, K and V their widths.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sagetrain.model.backends import AttentionFunction, TokenLayout, as_rows, as_sequences

_EPS = 1e-6
"""The number that is added to the squared norm of q and k, as fla does."""


class DeltaRule(AttentionFunction):
    """The gated delta rule as a value, which a layer has in the place of an attention function. Nothing is
    quantized."""

    name = "delta rule"
    how: ClassVar[str]
    """The code that computes it, in the words of the first lines of a run."""
    # fla's kernels and a loop over tokens are both no code for torch.compile.
    traceable = False

    def convolved(self, x: Sequence[Tensor], weights: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Convolve each x [B, S, C] with its weight [C, L] along the tokens before it in its document, and apply SiLU.
        The last column of a weight is for the token itself."""
        raise NotImplementedError

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TokenLayout, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence of `recurrence` in each document.

        Args:
            q: [B, S, H, K], not normalized.
            k: [B, S, H, K], not normalized.
            v: [B, S, N, V].
            g: the logarithm of the decay, [B, S, N].
            beta: the strength of the correction, [B, S, N].
            final: return the state behind the last token. There are no documents then.

        Returns:
            o [B, S, N, V] in the dtype of v, and the state fp32 [B, N, K, V] or None.
        """
        raise NotImplementedError


def delta_rule(device: torch.device, dtype: torch.dtype) -> DeltaRule:
    """Return the gated delta net's function on a device. Raises ValueError if a GPU has no package fla, or a version of
    Triton that compiles it wrongly, or the dtype has more than 16 bits there."""
    if torch.device(device).type != "cuda":
        return Recurrent()
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError("model.delta_net needs training.dtype bf16 on a GPU; use bf16")
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except ImportError as error:
        raise ValueError(
            f"model.delta_net needs the package fla on a GPU ({error}); pip install 'sagetrain[fla]', or set "
            "model.delta_net: null"
        ) from error
    triton = version("triton")
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    if on_hopper and (3, 4) <= tuple(int(part) for part in re.findall(r"\d+", triton)[:3]) < (3, 7, 1):
        raise ValueError(
            f"model.delta_net needs Triton 3.7.1 or newer on a Hopper GPU, and this is Triton {triton}: from 3.4 on it "
            "compiled wrong gradients of fla's kernels (fla-org/flash-linear-attention issue 640); install a newer one "
            "(torch 2.13 brings it), or set model.delta_net: null"
        )
    return Fla(rule, convolution)


@dataclass(frozen=True)
class Fla(DeltaRule):
    """The kernels of flash-linear-attention, in chunks of 64 tokens."""

    how = "by fla"
    documents = "delta_chunks"
    chunk_rule: Callable[..., tuple[Tensor, Tensor | None]]
    convolution: Callable[..., tuple[Tensor, Tensor | None]]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def convolved(self, x: Sequence[Tensor], weights: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Convolve each x, see DeltaRule."""
        how = {"activation": "silu", **_documents(layout)}
        pairs = zip(x, weights, strict=True)
        return [as_sequences(self.convolution(as_rows(each, layout), own, **how)[0], layout) for each, own in pairs]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TokenLayout, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence, see DeltaRule."""
        rows = (as_rows(x, layout) for x in (q, k, v, g, beta))
        how = {"use_qk_l2norm_in_kernel": True, **_documents(layout)}
        o, state = self.chunk_rule(*rows, output_final_state=final, **how)
        return as_sequences(o, layout), state


def _documents(layout: TokenLayout) -> dict[str, Any]:
    """Return the arguments for documents. With the chunks given, fla makes nothing that needs the host. What fla
    makes on the GPU it caches by the tensor of boundaries, and every pass of a model has a tensor of its own."""
    return {"cu_seqlens": layout.cu_seqlens, "chunk_indices": layout.delta_chunks}


@dataclass(frozen=True)
class Recurrent(DeltaRule):
    """The specification, token by token: exact but slow. A run without a GPU computes with it."""

    how = "in plain torch, since there is no GPU; exact but slow"

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def convolved(self, x: Sequence[Tensor], weights: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Convolve each x, see DeltaRule."""
        ages = document_ages(layout, x[0].shape[1])
        return [_convolved(each, weight, ages) for each, weight in zip(x, weights, strict=True)]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TokenLayout, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence, see DeltaRule."""
        state = q.new_zeros(len(q), v.shape[2], q.shape[3], v.shape[3], dtype=_wide(q))
        # The first token of a document forgets what was before it.
        first = document_ages(layout, q.shape[1]).unsqueeze(-1) == 0
        o, state = recurrence(q, k, v, g.masked_fill(first, -torch.inf), beta, state)
        return o, state if final else None


def document_ages(layout: TokenLayout, length: int) -> Tensor:
    """Return how many tokens of its document are before each token, [B, S]."""
    tokens = torch.arange(layout.num_sequences * length, device=layout.cos.device)
    if (ends := layout.cu_seqlens) is None:
        return (tokens % length).view(-1, length)
    starts = ends[torch.searchsorted(ends, tokens.to(ends.dtype), right=True) - 1]
    return (tokens - starts).view(-1, length)


def _convolved(x_BSC: Tensor, weight_CL: Tensor, ages_BS: Tensor) -> Tensor:
    x, weight = x_BSC.to(_wide(x_BSC)), weight_CL.to(_wide(x_BSC))
    y = torch.zeros_like(x)
    for back in range(weight.shape[1]):
        before = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]].masked_fill((ages_BS < back).unsqueeze(-1), 0)
        y = y + before * weight[:, -1 - back]
    return F.silu(y).to(x_BSC.dtype)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token, from a state [B, N, K, V] on. With q and k of length 1, and q divided by
    sqrt(K):

        state = exp(g) state
        state = state + k (beta (v - k^T state))^T
        o     = q^T state

    Each head of q and k serves as many heads of v. See DeltaRule.rule for the arguments.

    Returns:
        o [B, S, N, V] in the dtype of v, and the last state.
    """
    shared = v.shape[2] // q.shape[2]
    unit_q, unit_k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)).repeat_interleave(shared, 2)
        for x in (q.to(_wide(q)), k.to(_wide(k)))
    )
    scaled_q, made = unit_q * q.shape[3] ** -0.5, []
    for token in range(q.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        key = unit_k[:, token, :, :, None]
        correction = beta[:, token, :, None] * (v[:, token] - (key * state).sum(-2))
        state = state + key * correction.unsqueeze(-2)
        made.append((scaled_q[:, token, :, :, None] * state).sum(-2))
    return torch.stack(made, 1).to(v.dtype), state


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
