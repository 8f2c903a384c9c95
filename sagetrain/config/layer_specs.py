"""One value for each layer of a model: what its block computes. Blocks, the list of tensors, prices and choices read
it, so a new kind of layer is a field here. No torch."""

from __future__ import annotations

import functools
import itertools
from typing import Literal, NamedTuple

from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.config.sections.model import DeltaNetConfig, ExpertsConfig, ModelConfig, Norms, QKNorm, RopeScaling

WITH_SINKS = ("sage", "reference")
"""The values of attention.backend that compute attention with sinks."""


def exact_backend(model: ModelConfig) -> Literal["sdpa", "reference"]:
    """Return the backend that computes a model's attention in the precision of its inputs on any machine."""
    return "reference" if model.sinks else "sdpa"


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
    sinks: bool = False
    """Whether each query head has a sink."""
    out_bias: bool = False
    """Whether the output projection has a bias."""

    def heads_of(self, ranks: int) -> tuple[int, int]:
        """Return the query heads and the key/value heads that attention computes with on one of so many tensor- and
        context-parallel ranks together."""
        return self.heads // ranks, max(1, self.key_heads // ranks)

    def copies_of_keys(self, ranks: int) -> int:
        """Return the number of context-parallel ranks that have the same key/value heads in attention, on so many
        tensor- and context-parallel ranks together. It is 1 unless there are more ranks than key/value heads."""
        return max(1, ranks // self.key_heads)

    def context_sizes(self, tensor: int) -> list[int]:
        """Return the context-parallel sizes that are possible on so many tensor-parallel ranks: they divide a rank's
        query heads, and they divide its key/value heads or are multiples of them."""
        heads, key_heads = self.heads_of(tensor)
        sizes = (size for size in range(1, heads + 1) if heads % size == 0)
        return [size for size in sizes if key_heads % size == 0 or size % key_heads == 0]

    def gather_of(self, tensor: int, context: int) -> int:
        """Return the number of context-parallel ranks that gather keys and values from each other. It is 1 unless the
        context-parallel size is above a tensor-parallel rank's query heads. Then it is as small as `context_sizes`
        allow."""
        if context <= self.heads_of(tensor)[0]:
            return 1
        return min((context // size for size in self.context_sizes(tensor) if context % size == 0), default=1)

    def linear_layers(self, hidden: int, ranks: int) -> dict[str, LinearSizes]:
        """Return the sizes of the projections on one of so many tensor-parallel ranks, keyed by name."""
        query, key = (heads * self.head_dim // ranks for heads in (self.heads, self.key_heads))
        return {
            "qkv": LinearSizes(hidden, {"q": query, "k": key, "v": key}),
            "out": LinearSizes(query, {"out": hidden}),
        }


def _delta_net_layers(delta: DeltaNetConfig, hidden: int, ranks: int) -> dict[str, LinearSizes]:
    """Return the sizes of the projections of a gated delta net on one of so many tensor-parallel ranks, keyed by name.
    Those of its gates, a row for each head, are always in 16 bits and not among them."""
    keys, values = delta.key_heads * delta.key_dim // ranks, delta.value_heads * delta.value_dim // ranks
    return {
        "qkv": LinearSizes(hidden, {"q": keys, "k": keys, "v": values, "z": values}),
        "out": LinearSizes(values, {"out": hidden}),
    }


class MLPSpec(NamedTuple):
    """A dense MLP: down(silu(gate(x)) * up(x)), or another activation."""

    inner: int
    """Columns of gate, and of up. 0: there is no MLP beside the experts."""
    activation: str

    def linear_layers(self, hidden: int, ranks: int) -> dict[str, LinearSizes]:
        """Return the sizes of the linear layers on one of so many tensor-parallel ranks, keyed by name."""
        if not self.inner:
            return {}
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
    """The MLP that every token goes through. In a layer with experts it is that of the shared ones."""
    norms: Norms
    norm_eps: float
    gains_of_one: bool
    """Whether norms multiply by 1 + their gain."""
    experts: ExpertsConfig | None = None
    """The experts, whose sum is added to the output of `mlp`. None: the layer has none."""
    biased_experts: bool = False
    """Whether router and experts have biases, and experts the clamped SwiGLU."""
    delta_net: DeltaNetConfig | None = None
    """The gated delta net in the place of `attention`, which then describes the layers that have attention. None: the
    layer has attention."""
    value_embeddings: bool = False
    """Whether embeddings of the tokens are added to the values of `attention`."""

    @property
    def normed(self) -> tuple[bool, bool]:
        """Whether the inputs of attention and MLP are normalized, and whether their outputs are."""
        return self.norms != "post", self.norms != "pre"

    @property
    def joins_norms(self) -> bool:
        """Whether a kernel adds what attention or the MLP returns to the residual stream and normalizes the sum, where
        casts to 8 bits read its largest magnitudes (sagekernels/add_norm.py)."""
        return self.norms == "pre" and self.experts is None and not self.attention.out_bias

    @property
    def expert_activation(self) -> str:
        """The activation of experts, by its name in sagekernels/swiglu.py."""
        return "clamped_swiglu" if self.biased_experts else self.mlp.activation

    def linear_layers(self, tensor_parallel_size: int) -> dict[str, LinearSizes]:
        """Return the sizes of the block's linear layers on one rank, keyed by name: qkv, out, gate_up, down. The
        products of experts are not among them."""
        hidden, ranks = self.hidden, tensor_parallel_size
        delta, mixer = self.delta_net, self.attention.linear_layers(hidden, ranks)
        return (_delta_net_layers(delta, hidden, ranks) if delta else mixer) | self.mlp.linear_layers(hidden, ranks)

    def chosen_layers(self, tensor_parallel_size: int) -> dict[str, LinearSizes]:
        """Return what linear.precision is chosen for: the linear layers, and `experts` with the sizes of one expert's
        gate and up. The experts of a layer are in the same precision."""
        found = self.linear_layers(tensor_parallel_size)
        if self.experts is not None:
            inner = self.experts.ffn_size
            found["experts"] = LinearSizes(self.hidden, {"gate": inner, "up": inner})
        return found


# Proposing layouts asks for the layers of one model thousands of times.
@functools.lru_cache(maxsize=64)
def layers(model: ModelConfig, qk_norm: QKNorm = "none") -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from its input to its output. Layers that compute alike are equal. To linear layers
    attention.qk_norm makes no difference."""
    windows, gemma, oss = model.windows, model.conventions == "gemma", model.conventions == "gpt_oss"
    stretch = 1.0 if model.query_scale is None else (model.head_dim / model.query_scale) ** 0.25

    def layer(letter: str, experts: ExpertsConfig | None, values: bool) -> LayerSpec:
        reach = Reach(None, Rope(model.rope_theta, model.rope_scaling, stretch))
        if windows and letter == "W":
            scaling = model.rope_scaling if oss else None
            reach = Reach(windows.tokens, Rope(windows.rope_theta or model.rope_theta, scaling, stretch))
        attention = AttentionSpec(
            heads=model.num_attention_heads,
            key_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            reach=reach,
            qk_norm=qk_norm,
            bias=model.qkv_bias,
            sinks=model.sinks,
            out_bias=oss,
        )
        mlp = MLPSpec(experts.shared * experts.ffn_size if experts else model.ffn_hidden_size, model.activation)
        delta = model.delta_net if letter == "D" else None
        same = model.hidden_size, attention, mlp, model.norms, model.norm_eps, gemma, experts, oss
        return LayerSpec(*same, delta, values and delta is None)

    every = itertools.product("WDF", {None, model.experts}, (False, True))
    kinds = {kind: layer(*kind) for kind in every}
    pattern = windows.pattern if windows else model.delta_net.pattern if model.delta_net else "F"
    dense = model.experts.dense_layers if model.experts else 0
    return tuple(
        kinds[
            pattern[number % len(pattern)],
            None if number < dense else model.experts,
            model.value_embeddings and (model.num_layers - number) % 2 == 1,
        ]
        for number in range(model.num_layers)
    )


def linear_layers(model: ModelConfig, tensor_parallel_size: int) -> dict[str, LinearSizes]:
    """Return the sizes of a block's linear layers on one rank, keyed by name: qkv, out, gate_up, down. All blocks are
    alike in these, but for blocks with experts and those without (LayerSpec.linear_layers), and those with a gated
    delta net: the last block with attention counts."""
    return _last(model).linear_layers(tensor_parallel_size)


def chosen_layers(model: ModelConfig, tensor_parallel_size: int) -> dict[str, LinearSizes]:
    """Return what linear.precision is chosen for (LayerSpec.chosen_layers). The last block with attention counts."""
    return _last(model).chosen_layers(tensor_parallel_size)


def _last(model: ModelConfig) -> LayerSpec:
    every = layers(model)
    return next((layer for layer in reversed(every) if layer.delta_net is None), every[-1])
