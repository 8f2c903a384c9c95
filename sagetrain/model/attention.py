"""Self-attention: projections, QK-norm and rotary embedding around the layer's attention function (backends.py).

Shape letters: B sequences of the micro-batch, S tokens of a sequence, T tokens of this rank (B * S, or a slice of every
sequence under context parallelism), D hidden size, N query heads and M key/value heads on this rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Measured, Pending
from sagekernels.qk_norm_rope import qk_norm_rope
from sagekernels.rows import rows_of
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.model.backends import AttentionFunction, Projected, TokenLayout
from sagetrain.model.norm import RMSNorm
from sagetrain.model.rotary import apply_rotary, length_of
from sagetrain.parallel.collectives import Region, finish_enter, gather_heads, gather_sequences, scatter_heads
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads, spread over the tensor-parallel group. Raises ValueError if
    tensor_parallel_size does not divide the numbers of heads, or context_parallel_size is none of
    AttentionSpec.context_sizes.

    Heads are also spread over the context-parallel group while the sequences are whole, so that K-smoothing, masks and
    backends need not know of context parallelism. Where there are more context-parallel ranks than key/value heads,
    several ranks have the same key/value head. Where there are more than query heads, a rank has a part of the queries
    of its heads and gathers the keys and values.

    A call of the module runs the attention function alone. The block calls `project` before and `out` after it, see
    block.Block.
    """

    def __init__(
        self,
        layer: LayerSpec,
        function: AttentionFunction,
        region: Region,
        *,
        matmuls: Mapping[str, Matmul],
        vocab_size: int,
    ) -> None:
        super().__init__()
        groups = region.groups
        heads, key_heads = layer.attention.heads, layer.attention.key_heads
        divided = heads % groups.tp_size == key_heads % groups.tp_size == 0
        if not divided or groups.ulysses_size not in layer.attention.context_sizes(groups.tp_size):
            raise ValueError(
                f"{heads} heads and {key_heads} key/value heads do not divide among tensor_parallel_size "
                f"({groups.tp_size}) x context_parallel_size ({groups.cp_size})"
            )
        self.function = function
        """The attention function. It may be changed at any time, and torch.compile makes one more graph for a function
        that no layer had before. A model that was compiled without flash cannot change to flash, unless flash was in
        `later`."""
        self.groups = groups
        self.head_dim = layer.attention.head_dim
        self.window = layer.attention.reach.window
        self.qk_norm = layer.attention.qk_norm
        rope = layer.attention.reach.rope
        self._length = length_of(rope.scaling, rope.stretch)
        qkv, out = layer.attention.linear_layers(layer.hidden, 1).values()
        bias, out_bias = layer.attention.bias, layer.attention.out_bias
        self.qkv = ColumnParallelLinear(*qkv, region, bias=bias, matmul=matmuls.get("qkv"))
        self.out = RowParallelLinear(out.inputs, layer.hidden, region, bias=out_bias, matmul=matmuls.get("out"))

        def norm(heads: int) -> RMSNorm | None:
            if self.qk_norm == "none":
                return None
            spread, of_one = self.qk_norm == "all_heads", layer.gains_of_one
            width = heads * self.head_dim if spread else self.head_dim
            return RMSNorm(width, layer.norm_eps, region, spread=spread, split_input=not spread, of_one=of_one)

        self.q_norm, self.k_norm = norm(layer.attention.heads), norm(layer.attention.key_heads)
        self.sinks: nn.Parameter | None = None
        """The score of each query head's sink, of the heads of this tensor-parallel rank."""
        if layer.attention.sinks:
            self.sinks = region.parameter(heads // groups.tp_size)
        self.gates: ColumnParallelLinear | None = None
        if layer.value_embeddings:
            self.gates = ColumnParallelLinear(layer.hidden, {"values": key_heads}, region)
            self.values = region.parameter(vocab_size, key_heads * self.head_dim // groups.tp_size)
            """The embeddings that are added to values, of the key/value heads of this tensor-parallel rank."""
        self._own_heads = heads // groups.tp_size // groups.ulysses_size
        self._first_head = groups.ulysses_rank * self._own_heads

    @property
    def linear_layers(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The projections, keyed by name."""
        return {"qkv": self.qkv, "out": self.out}

    @property
    def norms(self) -> list[RMSNorm]:
        """The norms of q and k, if there are any."""
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]

    @property
    def in_one_node(self) -> bool:
        """Whether the attention function applies QK-norm and the rotary embedding, not `project`."""
        apart = self.groups.cp_size > 1 or self.sinks is not None
        return self.qk_norm == "before_rope" and self.function.normalizes and not apart

    def project(
        self,
        x_TD: Tensor | Measured | Pending,
        cos: Tensor,
        sin: Tensor,
        gains: dict[RMSNorm, Tensor],
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, normalized and rotated: [T, heads / tp, head_dim] each. If the attention function does
        that, return them as projected: [T, heads / tp * head_dim] each. x comes from start_enter and is [T, hidden]."""
        if self.gates is None:
            q, k, v = self.qkv(x_TD)
        else:
            # Two layers read x, so their gradients are added up before they are summed over the ranks.
            if not isinstance(x_TD, Tensor | Measured):
                x_TD = finish_enter(x_TD, self.gates.region)
            q, k, v = self.qkv(x_TD)
            (gate_TM,) = self.gates(x_TD)
            v = self._with_embeddings(v, gate_TM, tokens)
        if self.in_one_node:
            return q, k, v
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.qk_norm == "before_rope":
            of_q, of_k = (norm.entered(gains.get(norm)) for norm in (q_norm, k_norm))
            return qk_norm_rope(q, k, v, of_q, of_k, cos, sin, q_norm.eps)
        if q_norm is not None and k_norm is not None and self.qk_norm == "all_heads":
            q, k = q_norm(q), k_norm(k)
        q_TNK, k_TMK, v_TMK = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        q_TNK, k_TMK = apply_rotary(q_TNK, cos, sin), apply_rotary(k_TMK, cos, sin)
        if q_norm is not None and k_norm is not None and self.qk_norm == "after_rope":
            q_TNK, k_TMK = q_norm(q_TNK, gains.get(q_norm)), k_norm(k_TMK, gains.get(k_norm))
            if self._length != 1:  # Norms have undone the rotation's.
                q_TNK, k_TMK = q_TNK * self._length, k_TMK * self._length
        return q_TNK, k_TMK, v_TMK

    def _with_embeddings(self, v: Tensor, gate_TM: Tensor, tokens: Tensor | None) -> Tensor:
        """Add embeddings of the tokens to v [T, M * K], each head's times its gate, which is 1 for zeros."""
        assert tokens is not None
        rows_TMK = rows_of(self.values, tokens).unflatten(-1, (-1, self.head_dim))
        added_TMK: Tensor = 2 * gate_TM.sigmoid().unsqueeze(-1) * rows_TMK
        return v + added_TMK.flatten(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, gains: dict[RMSNorm, Tensor]) -> Tensor:
        """Run attention over q, k and v of all tokens of this rank, as `project` returns them, and return
        [T, heads / tp * head_dim]."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.in_one_node:
            of_q, of_k = (norm.entered(gains.get(norm)) for norm in (q_norm, k_norm))
            o_BSNK = self.function.normed(Projected(q, k, v, of_q, of_k, q_norm.eps), layout)
            return o_BSNK.flatten(0, 1).flatten(1)
        q, k, v = scatter_heads((q, k, v), layout.num_sequences, self.groups)
        o = self.attend(q, k, v, layout) if layout.chunks is None else self._attend_chunks(q, k, v, layout.chunks)
        return gather_heads(o, self.groups).flatten(1)

    def _attend_chunks(self, q: Tensor, k: Tensor, v: Tensor, chunks: tuple[TokenLayout, TokenLayout]) -> Tensor:
        """Run attention over two chunks of queries of each sequence, each with the keys up to its end. q, k and v are
        [B, S / gather, heads, K]."""
        k, v = gather_sequences(k, self.groups), gather_sequences(v, self.groups)
        size, found = q.shape[1] // 2, []
        numbers = self.groups.gather_rank, 2 * self.groups.gather_size - 1 - self.groups.gather_rank
        for part, number, layout in zip(q.split(size, 1), numbers, chunks, strict=True):
            end = (number + 1) * size
            found.append(self.attend(part, k[:, :end], v[:, :end], layout))
        return torch.cat(found, 1)

    def attend(self, q_BSNK: Tensor, k_BSMK: Tensor, v_BSMK: Tensor, layout: TokenLayout) -> Tensor:
        """Run the attention function on whole sequences, or a chunk of their queries, with this rank's heads. Return o
        in the shape of q."""
        if self.sinks is None:
            return self.function(q_BSNK, k_BSMK, v_BSMK, layout)
        sinks_N = self.sinks.narrow(0, self._first_head, self._own_heads)
        return self.function.with_sinks(q_BSNK, k_BSMK, v_BSMK, layout, sinks_N)
