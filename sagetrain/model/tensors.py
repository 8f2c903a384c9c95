"""Every tensor of a model, listed once, without torch.

Initialization, parameter counts, checkpoints, the optimizer's groups, gradient norms, import and export ask this list.
transformer.Transformer is the same model as modules, and has the entry of each of its parameters in `specs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from sagetrain.config.schema import AttentionConfig, ModelConfig

EMBEDDING = "embedding.weight"
"""The name of the embedding, which is the output projection too if they are tied."""


@dataclass(frozen=True)
class TensorSpec:
    """The facts about one tensor of a model that are known before it has values."""

    name: str
    """The name of the parameter in Transformer and in a checkpoint."""
    theirs: str
    """The name of the tensor in a Hugging Face folder."""
    shape: tuple[int, ...]
    """The whole shape, which no layout changes."""
    cut: Literal["tensor"] | None
    """The ranks that hold different slices. None: each rank holds the whole tensor."""
    dim: int | None
    """The dim along which the tensor is cut."""
    kind: Literal["matrix", "embedding", "gain"]
    """The role of the tensor in initialization and in the optimizer. embedding: input embedding and output
    projection."""
    layer: int | Literal["embedding", "head"]
    """The block that the tensor belongs to; the final norm belongs to the head."""
    into_stream: bool = False
    """Whether the layer's output is added to the residual stream, so that its weights begin smaller."""

    @property
    def size(self) -> int:
        """The number of values of the whole tensor."""
        return prod(self.shape)

    @property
    def is_gain(self) -> bool:
        """Whether this is the gain of a norm: it begins as 1, and does not decay."""
        return self.kind == "gain"


def tensors(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> Iterator[TensorSpec]:
    """List all tensors of a model from its input to its output; embedding and head have `vocab_size` rows."""
    hidden = model.hidden_size

    def matrix(layer: int, name: str, theirs: str, outputs: int, inputs: int, dim: int) -> TensorSpec:
        ours = f"blocks.{layer}.{name}", f"model.layers.{layer}.{theirs}.weight"
        return TensorSpec(*ours, (outputs, inputs), "tensor", dim, "matrix", layer, into_stream=dim == 1)

    def norm(layer: int, name: str, theirs: str) -> TensorSpec:
        ours = f"blocks.{layer}.{name}.gain", f"model.layers.{layer}.{theirs}.weight"
        return TensorSpec(*ours, (hidden,), None, None, "gain", layer)

    def qk_norm(layer: int, name: str) -> TensorSpec:
        ours = f"blocks.{layer}.attention.{name}.gain", f"model.layers.{layer}.self_attn.{name}.weight"
        return TensorSpec(*ours, (model.head_dim,), None, None, "gain", layer)

    layers = model.linear_layers(1)
    qkv, out, gate_up, down = (layers[name] for name in ("qkv", "out", "gate_up", "down"))
    table = vocab_size, hidden
    yield TensorSpec(EMBEDDING, "model.embed_tokens.weight", table, "tensor", 0, "embedding", "embedding")
    for layer in range(model.num_layers):
        yield norm(layer, "attention_norm", "input_layernorm")
        for name, outputs in qkv.outputs.items():
            yield matrix(layer, f"attention.qkv.{name}", f"self_attn.{name}_proj", outputs, qkv.inputs, dim=0)
        if attention.qk_norm != "none":
            yield qk_norm(layer, "q_norm")
            yield qk_norm(layer, "k_norm")
        yield matrix(layer, "attention.out.weight", "self_attn.o_proj", hidden, out.inputs, dim=1)
        yield norm(layer, "mlp_norm", "post_attention_layernorm")
        for name, outputs in gate_up.outputs.items():
            yield matrix(layer, f"mlp.gate_up.{name}", f"mlp.{name}_proj", outputs, gate_up.inputs, dim=0)
        yield matrix(layer, "mlp.down.weight", "mlp.down_proj", hidden, down.inputs, dim=1)
    yield TensorSpec("final_norm.gain", "model.norm.weight", (hidden,), None, None, "gain", "head")
    if not model.tie_embeddings:
        yield TensorSpec("head.weight", "lm_head.weight", table, "tensor", 0, "embedding", "head")
