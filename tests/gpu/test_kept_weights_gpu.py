"""8-bit weights that CUDA graphs renew are those that the host's launches make."""

from unittest.mock import patch

import pytest
import torch

import tiny
from on_gpu import needs_gpu
from sagetrain.config.schema import AttentionConfig, ExpertsConfig, LinearConfig, ModelConfig
from sagetrain.engines import kept_weights
from sagetrain.engines.kept_weights import KeptWeights
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.layers import keep_weights, linear_layers
from sagetrain.parallel.topology import ParallelGroups, Topology

pytestmark = needs_gpu()
SHAPE = ModelConfig(num_layers=2, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4, num_key_value_heads=2)
# The second block's experts keep as many tensors as an MLP.
EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 112, "dense_layers": 1}
MIXTURE = SHAPE.model_copy(update={"experts": ExpertsConfig.model_validate(EXPERTS)})


@pytest.mark.parametrize(("precision", "shape"), [("int8", MIXTURE), ("fp8", SHAPE)])
def test_graphs_renew_weights_in_place(precision: str, shape: ModelConfig) -> None:
    """The third turn comes after layers were set anew, as probes do, and in the fourth a block stays in 16 bits."""
    place = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    matmuls, _ = matmuls_of(LinearConfig(precision=precision), shape, tensor_parallel_size=1, **place)
    alone = ParallelGroups(Topology(1, 1), 0)
    model = tiny.transformer(
        shape, AttentionConfig(backend="sdpa"), vocab_size=64, groups=alone, matmuls=matmuls, **place
    )
    kept, launches = KeptWeights(in_place=True), []

    def counted(block: torch.nn.Module) -> None:
        launches.append(keep_weights(block))

    for turn in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02 * 4.0**turn)
        if turn == 2:
            model.matmuls = model.matmuls
        elif turn == 3:
            model.blocks.get_submodule("0").matmuls = {}
        with patch.object(kept_weights, "keep_weights", counted):
            for block in model.blocks:
                kept.renew(block)
        layers = list(linear_layers(model.blocks))
        graphed = [tensor.clone() for layer in layers for tensor in layer.kept]
        own = [layer.kept for layer in layers]
        keep_weights(model)
        again = [tensor for layer in layers for tensor in layer.kept]
        assert len(again) == (16 if turn == 3 else 32)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(graphed, again, strict=True))
        for layer, tensors in zip(layers, own, strict=True):
            layer.kept = tensors  # The graph writes into these.
    assert len(launches) == 2 * 2 + 1, "a block is launched once and captured once, and the one in 16 bits anew"
