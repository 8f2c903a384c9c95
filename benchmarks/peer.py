"""The model of benchmarks/step.py in plain PyTorch, with torchao's FP8 if it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import ModelConfig
from sagetrain.model.transformer import Transformer


class PeerNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)


def peer_attention(name: str, window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function for causal attention on [batch, tokens, heads, head_dim]. A query sees `window` tokens, its own
    included; None: all before it."""
    if name == "FlashAttention-4":
        from flash_attn.cute import flash_attn_func

        # FlashAttention-4's kernels cannot be traced, so torch.compile has to go around them.
        left = (None, None) if window is None else (window - 1, 0)
        return torch.compiler.disable(lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=left)[0])

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped, mask = q.shape[1] != k.shape[1], None
        if window is not None:
            back = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)
            mask = (back >= 0) & (back < window)
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return o.transpose(1, 2)

    return sdpa


class PeerBlock(nn.Module):
    def __init__(self, m: ModelConfig, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.heads, self.head_dim = (m.num_attention_heads, m.num_key_value_heads), m.head_dim
        self.norm1, self.norm2 = PeerNorm(m.hidden_size, m.norm_eps), PeerNorm(m.hidden_size, m.norm_eps)
        self.q_norm, self.k_norm = PeerNorm(m.head_dim, m.norm_eps), PeerNorm(m.head_dim, m.norm_eps)
        queries, keys = (count * m.head_dim for count in self.heads)
        self.qkv = nn.Linear(m.hidden_size, queries + 2 * keys, bias=False)
        self.out = nn.Linear(queries, m.hidden_size, bias=False)
        self.gate_up = nn.Linear(m.hidden_size, 2 * m.ffn_hidden_size, bias=False)
        self.down = nn.Linear(m.ffn_hidden_size, m.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries, keys = self.heads
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head_dim)).split((queries, keys, keys), 2)
        q, k = (self._rotate(norm(t), cos, sin) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        x = x + self.out(self.attend(q, k, v).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Peer(nn.Module):
    """A Llama of the same shape, as it is written without parallelism in mind: with fused q, k, v and fused gate,
    up."""

    def __init__(self, m: ModelConfig, attention: str, seq_length: int, vocab_size: int) -> None:
        super().__init__()
        angles = torch.arange(seq_length)[:, None] * m.rope_theta ** -(torch.arange(0, m.head_dim, 2) / m.head_dim)
        self.cos, self.sin = (
            nn.Buffer(table[None, :, None], persistent=False) for table in (angles.cos(), angles.sin())
        )
        windows = [layer.attention.reach.window for layer in layers(m)]
        attend = {window: peer_attention(attention, window) for window in windows}
        self.embedding = nn.Embedding(vocab_size, m.hidden_size)
        self.blocks = nn.ModuleList(PeerBlock(m, attend[window]) for window in windows)
        self.norm = PeerNorm(m.hidden_size, m.norm_eps)
        self.head = nn.Linear(m.hidden_size, vocab_size, bias=False)
        if m.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())

    @torch.no_grad()
    def take_weights(self, model: Transformer) -> None:
        self.embedding.weight.copy_(model.embedding.weight)
        self.head.weight.copy_(model.head.weight)
        for mine, theirs in zip(self.blocks, model.blocks, strict=True):
            attention, mlp = theirs.attention, theirs.mlp
            mine.qkv.weight.copy_(torch.cat([attention.qkv.q, attention.qkv.k, attention.qkv.v]))
            mine.out.weight.copy_(attention.out.weight)
            mine.gate_up.weight.copy_(torch.cat([mlp.gate_up.gate, mlp.gate_up.up]))
            mine.down.weight.copy_(mlp.down.weight)


def convert(peer: Peer, recipe: str, emulate: bool) -> None:
    """Convert linear layers to torchao's FP8, as its documentation describes. Raises ImportError if torchao is not
    installed."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(peer, config=config, module_filter_fn=lambda module, name: name != "head")
