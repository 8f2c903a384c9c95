"""The list of a model's tensors agrees with its modules and with transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.interop.families import family_of
from sagetrain.interop.huggingface import config_json
from sagetrain.model.placement import place
from sagetrain.model.tensors import tensors
from sagetrain.parallel.layers import shard
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB = 128
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
MODELS = {
    "plain": {"num_attention_heads": 4},
    "grouped": GROUPED,
    "tied": {**GROUPED, "tie_embeddings": True},
    "biased": {**GROUPED, "qkv_bias": True},
    "post": {**GROUPED, "norms": "post"},
    "sandwich": {**GROUPED, "norms": "sandwich"},
}


def shape_of(name: str) -> ModelConfig:
    return ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, **MODELS[name])


@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "all_heads"])
@pytest.mark.parametrize("model", MODELS)
def test_the_list_is_the_modules(model: str, qk_norm: str) -> None:
    """The list has exactly the parameters, and the slice that it states at every tensor-parallel size."""
    attention = AttentionConfig(backend="sdpa", qk_norm=qk_norm)
    for tp_size in (1, 2, 4):
        groups = ParallelGroups(Topology(tp_size, tp_size), rank=tp_size - 1)
        network = tiny.transformer(shape_of(model), attention, vocab_size=VOCAB, groups=groups, seed=None)
        listed = {spec.name: spec for spec in tensors(shape_of(model), attention, VOCAB)}
        assert listed == network.specs and [*network.specs] == [name for name, _ in network.named_parameters()]
        for name, parameter in network.named_parameters():
            spec = listed[name]
            assert shard(torch.empty(spec.shape, device="meta"), spec.dim, groups).shape == parameter.shape, name
            placed = [place(spec, ParallelGroups(Topology(tp_size, tp_size), rank)) for rank in range(tp_size)]
            slices = spec.size // parameter.numel()
            assert sorted({each.slice for each in placed}) == [each.slice for each in placed if each.counted], name
            assert {(each.slices, each.copies) for each in placed} == {(slices, tp_size // slices)}, name
            heads = qk_norm == "all_heads" and "attention." in name
            assert (spec.cut is None) == (spec.dim is None) == (spec.kind == "gain" and not heads), name
            assert spec.decays == (parameter.ndim == 2), name
            assert spec.into_stream == name.endswith(("attention.out.weight", "mlp.down.weight")), name
            assert not vars(parameter), f"{name}: what hangs on a parameter is lost when an engine makes it anew"


@pytest.mark.parametrize(
    ("model", "qk_norm"),
    [*itertools.product(("plain", "grouped", "tied"), ("none", "before_rope")), ("biased", "none")],
)
def test_the_list_has_the_names_and_shapes_of_transformers(model: str, qk_norm: str) -> None:
    shape, attention = shape_of(model), AttentionConfig(qk_norm=qk_norm)
    family = family_of(shape, attention)
    described = config_json(shape, attention, VOCAB, seq_length=64)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    found = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {family.tensor(spec.name): spec.shape for spec in tensors(shape, attention, VOCAB)} == found
