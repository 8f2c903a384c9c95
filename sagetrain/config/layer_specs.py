"""One value for each layer of a model: what its block computes. Blocks, the list of tensors, prices and choices read
it, so a new kind of layer is a field here. No torch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.config.sections.model import ModelConfig, Norms, QKNorm, RopeScaling


class Rope(NamedTuple):
    """The rotary position embedding of a layer."""

    theta: float
    scaling: RopeScaling | None
    stretch: float = 1.0
    """The factor on q and k. Its square is a factor on scores."""


class Reach(NamedTuple):
    """The kind of a layer's attention as far as positions matter."""

    window: int | None
    """Tokens that a query sees, its own included. None: all before it."""
    rope: Rope


class AttentionSpec(NamedTuple):
    """Self-attention, its projections included."""

    heads: int
    """Query heads."""
    key_heads: int
    """Key/value heads."""
    head_dim: int
    reach: Reach
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
    """A dense MLP: down(silu(gate(x)) * up(x)), or another activation."""

    inner: int
    """Columns of gate, and of up."""
    activation: str

    def linear_layers(self, hidden: int, ranks: int) -> dict[str, LinearSizes]:
        """Return the sizes of the linear layers on one of so many tensor-parallel ranks, keyed by name."""
        inner = self.inner // ranks
        return {
            "gate_up": LinearSizes(hidden, {"gate": inner, "up": inner}),
            "down": LinearSizes(inner, {"down": hidden}),
        }


class LayerSpec(NamedTuple):
    """One block. With pre-norms it is x + attention(norm(x)), then x + mlp(norm(x))."""

    hidden: int
    """Width of the residual stream."""
    attention: AttentionSpec
    mlp: MLPSpec
    norms: Norms
    norm_eps: float
    gains_of_one: bool
    """Whether norms multiply by 1 + their gain."""

    @property
    def normed(self) -> tuple[bool, bool]:
        """Whether the inputs of attention and MLP are normalized, and whether their outputs are."""
        return self.norms != "post", self.norms != "pre"

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
    windows, gemma = model.windows, model.conventions == "gemma"
    stretch = 1.0 if model.query_scale is None else (model.head_dim / model.query_scale) ** 0.25

    def layer(windowed: bool) -> LayerSpec:
        reach = Reach(None, Rope(model.rope_theta, model.rope_scaling, stretch))
        if windows and windowed:
            reach = Reach(windows.tokens, Rope(windows.rope_theta or model.rope_theta, None, stretch))
        attention = AttentionSpec(
            heads=model.num_attention_heads,
            key_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            reach=reach,
            qk_norm=qk_norm,
            bias=model.qkv_bias,
        )
        mlp = MLPSpec(model.ffn_hidden_size, model.activation)
        return LayerSpec(model.hidden_size, attention, mlp, model.norms, model.norm_eps, gemma)

    kinds = {letter: layer(letter == "W") for letter in "WF"}
    pattern = windows.pattern if windows else "F"
    return tuple(kinds[pattern[number % len(pattern)]] for number in range(model.num_layers))


def linear_layers(model: ModelConfig, tensor_parallel_size: int) -> dict[str, LinearSizes]:
    """Return the sizes of a block's four linear layers on one rank, keyed by name: qkv, out, gate_up, down. All blocks
    are alike in these."""
    return layers(model)[0].linear_layers(tensor_parallel_size)
