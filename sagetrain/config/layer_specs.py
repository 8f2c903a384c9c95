"""One value for each layer of a model: what its block computes. Blocks, the list of tensors, prices and choices read
it, so a new kind of layer is a field here. No torch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.config.sections.model import ModelConfig, QKNorm, RopeScaling


class Rope(NamedTuple):
    """The rotary position embedding of a layer."""

    theta: float
    scaling: RopeScaling | None


class AttentionSpec(NamedTuple):
    """Self-attention, its projections included."""

    heads: int
    """Query heads."""
    key_heads: int
    """Key/value heads."""
    head_dim: int
    rope: Rope
    qk_norm: QKNorm
    bias: bool
    """Whether q, k and v have biases."""

    def linear_layers(self, hidden: int, ranks: int) -> dict[str, LinearSizes]:
        """Return the sizes of the projections on one of so many tensor-parallel ranks, keyed by name."""
        query, key = (heads * self.head_dim // ranks for heads in (self.heads, self.key_heads))
        return {
            "qkv": LinearSizes(hidden, {"q": query, "k": key, "v": key}),
            "out": LinearSizes(query, {"out": hidden}),
        }


class MLPSpec(NamedTuple):
    """A dense MLP: down(silu(gate(x)) * up(x))."""

    inner: int
    """Columns of gate, and of up."""

    def linear_layers(self, hidden: int, ranks: int) -> dict[str, LinearSizes]:
        """Return the sizes of the linear layers on one of so many tensor-parallel ranks, keyed by name."""
        inner = self.inner // ranks
        return {
            "gate_up": LinearSizes(hidden, {"gate": inner, "up": inner}),
            "down": LinearSizes(inner, {"down": hidden}),
        }


class LayerSpec(NamedTuple):
    """One block: x + attention(norm(x)), then x + mlp(norm(x))."""

    hidden: int
    """Width of the residual stream."""
    attention: AttentionSpec
    mlp: MLPSpec
    norm_eps: float

    def linear_layers(self, tensor_parallel_size: int) -> dict[str, LinearSizes]:
        """Return the sizes of the block's four linear layers on one rank, keyed by name: qkv, out, gate_up, down."""
        ranks = tensor_parallel_size
        return self.attention.linear_layers(self.hidden, ranks) | self.mlp.linear_layers(self.hidden, ranks)


# Proposing layouts asks for the layers of one model thousands of times.
@functools.lru_cache(maxsize=64)
def layers(model: ModelConfig, qk_norm: QKNorm = "none") -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from its input to its output. Layers that compute alike are equal.

    Args:
        qk_norm: attention.qk_norm. It makes no difference to linear layers.
    """
    attention = AttentionSpec(
        heads=model.num_attention_heads,
        key_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        rope=Rope(model.rope_theta, model.rope_scaling),
        qk_norm=qk_norm,
        bias=model.qkv_bias,
    )
    layer = LayerSpec(model.hidden_size, attention, MLPSpec(model.ffn_hidden_size), model.norm_eps)
    return (layer,) * model.num_layers


def linear_layers(model: ModelConfig, tensor_parallel_size: int) -> dict[str, LinearSizes]:
    """Return the sizes of a block's four linear layers on one rank, keyed by name: qkv, out, gate_up, down. All blocks
    are alike in these."""
    return layers(model)[0].linear_layers(tensor_parallel_size)
