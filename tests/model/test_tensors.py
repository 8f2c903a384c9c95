"""The list of a model's tensors agrees with its modules and with transformers."""

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from sagetrain.config.schema import AttentionConfig, ExpertsConfig, ModelConfig
from sagetrain.interop.families import family_of
from sagetrain.interop.huggingface import config_json
from sagetrain.model.initialization import initialize
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
    "sinks": {**GROUPED, "sinks": True},
    "values": {**GROUPED, "value_embeddings": True},
    "post": {**GROUPED, "norms": "post"},
    "sandwich": {**GROUPED, "norms": "sandwich"},
}


def shape_of(name: str) -> ModelConfig:
    return ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, **MODELS[name])


@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "all_heads"])
@pytest.mark.parametrize("model", MODELS)
def test_the_list_is_the_modules(model: str, qk_norm: str) -> None:
    """The list has exactly the parameters, and the slice that it states at every tensor-parallel size."""
    attention = AttentionConfig(backend="reference", qk_norm=qk_norm)
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


def test_layers_with_experts_list_a_router_and_two_tensors() -> None:
    """They stand in the layers behind the dense ones, and each expert has first values of its own."""
    experts = ExpertsConfig(number=4, per_token=2, ffn_size=16, shared=2, dense_layers=1)
    listed = [*tensors(shape_of("plain").model_copy(update={"experts": experts}), AttentionConfig(), VOCAB)]
    mlps = {spec.name: spec for spec in listed if ".mlp." in spec.name}
    dense = ("blocks.0.mlp.gate_up.gate", "blocks.0.mlp.gate_up.up", "blocks.0.mlp.down.weight")
    shared = tuple(name.replace("0.mlp", "1.mlp.shared") for name in dense)
    of_experts = {
        "blocks.1.mlp.router.weight": ((4, 32), "router", 1, False),
        "blocks.1.mlp.router.bias": ((4,), "state", 1, False),
        "blocks.1.mlp.router.load": ((4,), "state", 1, False),
        "blocks.1.mlp.experts.gate_up": ((4, 32, 32), "matrix", 8, True),
        "blocks.1.mlp.experts.down": ((4, 32, 16), "matrix", 4, True),
    }
    assert [*mlps] == [*dense, *of_experts, *shared]
    assert mlps[shared[-1]].shape == (32, 32) and mlps[dense[-1]].shape == (32, 48)
    groups = ParallelGroups(Topology(2, 2), rank=1)
    for name, facts in of_experts.items():
        spec = mlps[name]
        assert (spec.shape, spec.kind, spec.matrices, spec.decays) == facts and spec.wide == ("router" in name)
        assert place(spec, groups)[:3] == (0, 1, 2) and spec.into_stream == name.endswith("down")
    spec = mlps["blocks.1.mlp.experts.down"]
    flat = torch.nn.Parameter(torch.empty(4 * 32, 16, device="meta"))
    initialize([(spec, flat)], shape_of("plain"), groups, 7, torch.device("cpu"), None)
    assert flat.view(spec.shape).std((1, 2)).sub(0.01).abs().max() < 0.001
    assert not any(torch.equal(*pair) for pair in itertools.combinations(flat.view(spec.shape), 2))


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
    listed = {name: spec.matrix for spec in tensors(shape, attention, VOCAB) for name in family.theirs(spec)}
    assert listed == found
