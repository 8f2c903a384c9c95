"""Self-attention: projections, QK-norm, rotary embedding, and the backends that compute softmax(q k^T) v.

Shape letters: B sequences of the micro-batch, S tokens of a sequence, T = B * S tokens, D hidden size, N query heads
and M key/value heads on this rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.norm import RMSNorm
from sagetrain.model.rotary import apply_rotary
from sagetrain.parallel.collectives import enter_region
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear
from sagetrain.parallel.topology import ParallelGroups


class TokenLayout(NamedTuple):
    """How the flat tokens fall into sequences and documents; one per forward pass, shared by all blocks."""

    num_sequences: int
    cos: Tensor
    """fp32 [T, 1, K / 2]."""
    sin: Tensor
    """fp32 [T, 1, K / 2]."""
    cu_seqlens: Tensor | None
    """int32 [documents + 1] over all T tokens; None: attention within each sequence, whatever the documents."""
    max_seqlen: int | None
    """Tokens of the longest document."""
    mask: Tensor | None
    """bool [B, 1, S, S], True where a query sees a key; only for a backend that takes no cu_seqlens."""


def document_mask(cu_seqlens: Tensor, num_sequences: int, num_tokens: int) -> Tensor:
    """bool [B, 1, S, S]: causal, and within one document. Documents must not span sequences."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document_BS = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True).view(num_sequences, -1)
    same = document_BS.unsqueeze(-1) == document_BS.unsqueeze(-2)
    return same.tril().unsqueeze(1)


AttentionFunction = Callable[[Tensor, Tensor, Tensor, TokenLayout], Tensor]
"""(q [B, S, N, K], k [B, S, M, K], v [B, S, M, K], layout) -> [B, S, N, K]."""


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    gqa = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask, is_causal=layout.mask is None, enable_gqa=gqa)
    return o.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads, its heads spread over the tensor-parallel group."""

    def __init__(
        self,
        model: ModelConfig,
        attention: AttentionConfig,
        attend: AttentionFunction,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.attend = attend
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        self.head_dim = model.head_dim
        self.qk_norm = attention.qk_norm
        hidden = model.hidden_size
        query_size = model.num_attention_heads * model.head_dim
        key_value_size = model.num_key_value_heads * model.head_dim
        self.q = ColumnParallelLinear(hidden, query_size, groups, dtype=dtype, device=device)
        self.k = ColumnParallelLinear(hidden, key_value_size, groups, dtype=dtype, device=device)
        self.v = ColumnParallelLinear(hidden, key_value_size, groups, dtype=dtype, device=device)
        self.out = RowParallelLinear(
            query_size, hidden, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        if self.qk_norm != "none":
            norm = {"split_input": True, "dtype": dtype, "device": device}
            self.q_norm = RMSNorm(model.head_dim, model.norm_eps, groups, **norm)
            self.k_norm = RMSNorm(model.head_dim, model.norm_eps, groups, **norm)

    def forward(self, x_TD: Tensor, layout: TokenLayout) -> Tensor:
        """[tokens (/ tp with sequence parallelism), hidden] -> same."""
        x_TD = enter_region(x_TD, self.groups, self.sequence_parallel)
        q_TNK = self.q(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TMK = self.k(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TMK = self.v(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm == "before_rope":
            q_TNK, k_TMK = self.q_norm(q_TNK), self.k_norm(k_TMK)
        q_TNK = apply_rotary(q_TNK, layout.cos, layout.sin)
        k_TMK = apply_rotary(k_TMK, layout.cos, layout.sin)
        if self.qk_norm == "after_rope":
            q_TNK, k_TMK = self.q_norm(q_TNK), self.k_norm(k_TMK)
        rows = (layout.num_sequences, -1)
        o_BSNK = self.attend(q_TNK.unflatten(0, rows), k_TMK.unflatten(0, rows), v_TMK.unflatten(0, rows), layout)
        return self.out(o_BSNK.flatten(2).flatten(0, 1))
