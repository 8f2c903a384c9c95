"""A model of two blocks with linear layers in 8 bits. Ways to compute it are compared by its loss and gradients."""

from typing import Any

import torch
from torch import Tensor

import tiny
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

SINGLE = ParallelGroups.single()
SHAPE = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_key_value_heads=2)


def small_model(
    precision: str = "fp8",
    shape: ModelConfig = SHAPE,
    backend: str = "sdpa",
    linear: dict[str, int] | None = None,
    **how: Any,
) -> Transformer:
    """Build the model in float32, in which nothing is rounded on the way but by the linear layers."""
    section, place = LinearConfig(precision=precision, **linear or {}), {"device": torch.device("cpu")}
    matmuls, _ = matmuls_of(section, shape, tensor_parallel_size=1, dtype=torch.float32, **place)
    attention = AttentionConfig(backend=backend, recipe="scores")
    model = tiny.transformer(shape, attention, vocab_size=128, groups=SINGLE, matmuls=matmuls, **how)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    model.keep_weights()
    return model


def loss_and_gradients(model: Transformer, compiled: bool = False, **packing: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of all parameters, for four sequences of 16 tokens."""
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, backend="aot_eager")
    text = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(5))
    loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous(), **packing)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]
