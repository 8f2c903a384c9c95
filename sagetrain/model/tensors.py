"""Every tensor of a model, listed once, without torch.

Initialization, parameter counts, checkpoints, the optimizer's groups, gradient norms, import and export ask this list.
transformer.Transformer is the same model as modules, and has the entry of each of its parameters in `specs`. The names
that tensors have in Hugging Face folders are in interop/families.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from sagetrain.config.layer_specs import LayerSpec, layers
from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.config.schema import AttentionConfig, ExpertsConfig, ModelConfig

EMBEDDING = "embedding.weight"
"""The name of the embedding, which is the output projection too if they are tied."""


@dataclass(frozen=True)
class TensorSpec:
    """The facts about one tensor of a model that are known before it has values."""

    name: str
    """The name of the parameter in Transformer and in a checkpoint."""
    shape: tuple[int, ...]
    """The whole shape, which no layout changes."""
    cut: Literal["tensor", "experts"] | None
    """The ranks that hold different slices: those of tensor parallelism, or those that share experts. None: each rank
    holds the whole tensor."""
    dim: int | None
    """The dim along which the tensor is cut."""
    kind: Literal["matrix", "embedding", "gain", "bias", "router", "state", "conv", "decay", "step"]
    """The role of the tensor in initialization and in the optimizer. embedding: input embedding, embeddings that are
    added to values, and output projection.
    bias: added to a layer's output, or a sink's score. router: the matrix that makes a token's scores of experts, and
    the bias of these. state: a step changes it by other means than an optimizer, and checkpoints have it. conv, decay,
    step: the convolutions, a_log and dt_bias of a gated delta net."""
    layer: int | Literal["embedding", "head"]
    """The block that the tensor belongs to; the final norm belongs to the head."""
    into_stream: bool = False
    """Whether the layer's output is added to the residual stream, so that its weights begin smaller."""
    of_one: bool = False
    """Whether a norm multiplies by 1 + this gain."""
    of_zeros: bool = False
    """Whether a matrix begins as zeros."""
    matrices: int = 1
    """The equal matrices that stand one above the other in this tensor: gate and up of each expert, for instance."""

    @property
    def wide(self) -> bool:
        """Whether the tensor is fp32 in a model of any dtype."""
        return self.kind in ("router", "state")

    @property
    def tensor_dim(self) -> int | None:
        """The dim along which tensor parallelism cuts the tensor. None: it does not."""
        return self.dim if self.cut == "tensor" else None

    @property
    def of_own_tokens(self) -> bool:
        """Whether a tensor-parallel rank's gradient is that of its own tokens, and not yet summed over the ranks."""
        return self.cut == "experts" or self.wide

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of each of its matrices."""
        *rows, columns = self.shape
        return (prod(rows) // self.matrices, columns) if self.matrices > 1 else self.shape

    @property
    def size(self) -> int:
        """The number of values of the whole tensor."""
        return prod(self.shape)

    @property
    def begins(self) -> float | None:
        """The number that all values begin as. None: they are drawn."""
        zero = self.of_zeros or self.kind in ("bias", "state") or (self.kind == "router" and len(self.shape) == 1)
        return 0.0 if zero else {"gain": 0.0 if self.of_one else 1.0}.get(self.kind)

    @property
    def decays(self) -> bool:
        """Whether weight decay is for this tensor. It is for matrices and embeddings."""
        return self.kind in ("matrix", "embedding")


def tensors(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> Iterator[TensorSpec]:
    """List all tensors of a model from its input to its output; embedding and head have `vocab_size` rows."""
    table = vocab_size, model.hidden_size
    yield TensorSpec(EMBEDDING, table, "tensor", 0, "embedding", "embedding")
    for number, layer in enumerate(layers(model, attention.qk_norm)):
        yield from _of_layer(number, layer, vocab_size)
    of_one = model.conventions == "gemma"
    yield TensorSpec("final_norm.gain", (model.hidden_size,), None, None, "gain", "head", of_one=of_one)
    if not model.tie_embeddings:
        yield TensorSpec("head.weight", table, "tensor", 0, "embedding", "head")


def _of_layer(number: int, layer: LayerSpec, vocab_size: int) -> Iterator[TensorSpec]:
    hidden, attention, of_one = layer.hidden, layer.attention, layer.gains_of_one

    def gain(name: str, width: int) -> TensorSpec:
        return TensorSpec(f"blocks.{number}.{name}.gain", (width,), None, None, "gain", number, of_one=of_one)

    def qk_gain(name: str, heads: int) -> TensorSpec:
        if attention.qk_norm != "all_heads":
            return gain(name, attention.head_dim)
        width = heads * attention.head_dim
        return TensorSpec(f"blocks.{number}.{name}.gain", (width,), "tensor", 0, "gain", number, of_one=of_one)

    def column(name: str, sizes: LinearSizes, bias: bool = False) -> Iterator[TensorSpec]:
        for weight, outputs in sizes.outputs.items():
            shape = outputs, sizes.inputs
            yield TensorSpec(f"blocks.{number}.{name}.{weight}", shape, "tensor", 0, "matrix", number)
            if bias:
                yield TensorSpec(f"blocks.{number}.{name}.{weight}_bias", (outputs,), "tensor", 0, "bias", number)

    def row(name: str, sizes: LinearSizes) -> TensorSpec:
        shape = hidden, sizes.inputs
        return TensorSpec(f"blocks.{number}.{name}.weight", shape, "tensor", 1, "matrix", number, into_stream=True)

    linear = layer.linear_layers(1)
    before, after = layer.normed
    if before:
        yield gain("attention_norm", hidden)
    if (delta := layer.delta_net) is not None:
        sizes, heads, within = linear["qkv"].outputs, delta.value_heads, f"blocks.{number}.attention"
        yield from column("attention.qkv", linear["qkv"])
        yield from column("attention.gates", LinearSizes(hidden, {"a": heads, "b": heads}))
        for name in ("q", "k", "v"):
            shape = sizes[name], delta.conv_size
            yield TensorSpec(f"{within}.{name}_conv", shape, "tensor", 0, "conv", number)
        yield TensorSpec(f"{within}.a_log", (heads,), "tensor", 0, "decay", number)
        yield TensorSpec(f"{within}.dt_bias", (heads,), "tensor", 0, "step", number)
        yield gain("attention.o_norm", delta.value_dim)
    else:
        yield from column("attention.qkv", linear["qkv"], attention.bias)
        if attention.qk_norm != "none":
            yield qk_gain("attention.q_norm", attention.heads)
            yield qk_gain("attention.k_norm", attention.key_heads)
        if attention.sinks:
            yield TensorSpec(f"blocks.{number}.attention.sinks", (attention.heads,), "tensor", 0, "bias", number)
        if layer.value_embeddings:
            heads, within = attention.key_heads, f"blocks.{number}.attention"
            table, gate = (vocab_size, heads * attention.head_dim), (heads, hidden)
            yield TensorSpec(f"{within}.values", table, "tensor", 1, "embedding", number)
            yield TensorSpec(f"{within}.gates.values", gate, "tensor", 0, "matrix", number, of_zeros=True)
    yield row("attention.out", linear["out"])
    if attention.out_bias:
        yield TensorSpec(f"blocks.{number}.attention.out.bias", (hidden,), None, None, "bias", number)
    if after:
        yield gain("attention_post_norm", hidden)
    if before:
        yield gain("mlp_norm", hidden)
    if layer.experts:
        yield from _of_experts(f"blocks.{number}.mlp", number, layer.hidden, layer.experts, layer.biased_experts)
    if layer.mlp.inner:
        name = "mlp.shared" if layer.experts else "mlp"
        yield from column(f"{name}.gate_up", linear["gate_up"])
        yield row(f"{name}.down", linear["down"])
    if after:
        yield gain("mlp_post_norm", hidden)


def _of_experts(mlp: str, number: int, hidden: int, experts: ExpertsConfig, biased: bool) -> Iterator[TensorSpec]:
    """List the tensors of a router and its experts. gate and up of an expert stand one above the other."""
    count, inner = experts.number, experts.ffn_size
    yield TensorSpec(f"{mlp}.router.weight", (count, hidden), None, None, "router", number)
    if biased:
        yield TensorSpec(f"{mlp}.router.logit_bias", (count,), None, None, "router", number)
    yield TensorSpec(f"{mlp}.router.bias", (count,), None, None, "state", number)
    yield TensorSpec(f"{mlp}.router.load", (count,), None, None, "state", number)
    gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
    yield TensorSpec(f"{mlp}.experts.gate_up", gate_up, "experts", 0, "matrix", number, matrices=2 * count)
    yield TensorSpec(f"{mlp}.experts.down", down, "experts", 0, "matrix", number, into_stream=True, matrices=count)
    for name, shape in (("gate_up", gate_up[:2]), ("down", down[:2])) if biased else ():
        yield TensorSpec(f"{mlp}.experts.{name}_bias", shape, "experts", 0, "bias", number)
