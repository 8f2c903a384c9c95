"""A plan prices the blocks that a pipeline stage has, by their numbers: sizes, kinds and activations are those of the
stage as it is built."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest
import torch

import tiny
from counted import VOCAB, run_config, saved_bytes_per_token
from sagetrain.config import RunConfig
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import LOW_BIT
from sagetrain.costs.accounting import elements, rank_of
from sagetrain.costs.memory import _activations, _matmuls
from sagetrain.costs.stages import Held, chunks_of_stage, different_stages, held
from sagetrain.model.block import Block
from sagetrain.model.moe import MoE
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups, Topology


def drawn(seed: int) -> tuple[RunConfig, int]:
    """Draw a model whose layers alternate in several ways, with its layout and number of ranks."""
    draw = random.Random(seed)
    kind = draw.choice(["windows", "experts", "hybrid", "plain"])
    stages, chunks = draw.choice([(1, 1), (2, 1), (2, 3), (3, 1), (3, 2), (4, 1)])
    count = draw.randint(stages * chunks, 14)
    tensor = 1 if kind == "hybrid" else draw.choice([1, 2])
    letters = "DF" if kind == "hybrid" else "WF"
    pattern = "".join(draw.choices(letters, k=draw.randint(2, 5)))
    # Sides of 64 or 128 are in 8 bits.
    model = {"num_layers": count, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    model |= {"num_key_value_heads": 2, "head_dim": 32, "value_embeddings": draw.random() < 0.7}
    model |= {"tie_embeddings": draw.random() < 0.5, "qkv_bias": kind == "windows" and draw.random() < 0.5}
    ranks = 1
    if kind == "windows":
        model["windows"] = {"tokens": 5, "pattern": pattern}
    elif kind == "hybrid":
        model["delta_net"] = {"pattern": pattern, "key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 32}
    elif kind == "experts":
        ranks = draw.choice([1, 2])
        model["experts"] = {"number": 4, "per_token": 1, "ffn_size": 32, "shared": draw.randint(0, 1)}
        model["experts"]["dense_layers"] = draw.randint(0, count)
    sizes = sorted(draw.sample(range(1, count), stages * chunks - 1))
    blocks = [high - low for low, high in zip([0, *sizes], [*sizes, count], strict=True)]
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "pipeline_chunks": chunks}
    parallel |= {"pipeline_blocks": draw.choice(["auto", blocks]), "expert_parallel_size": ranks, "engine": "fsdp"}
    linear = {"precision": draw.choice(["bf16", "int8"]), "keep_first_blocks": draw.randint(0, 3)}
    linear["keep_last_blocks"] = draw.randint(0, 3)
    again = draw.choice(["none", "full", draw.randint(0, count)])
    optimizer = {"name": draw.choice(["adamw", "muon"])}
    how = {"linear": linear, "optimizer": optimizer, "training": {"activation_checkpointing": again}}
    attention = {"qk_norm": draw.choice(["none", "before_rope"])}
    return tiny.config(1, "bf16", model=model, parallel=parallel, attention=attention, **how), 2 * stages * tensor


def built(cfg: RunConfig, world_size: int, stage: int) -> Transformer:
    """Build what the first rank of a stage has, without memory."""
    parallel, dtype = cfg.parallel, torch.bfloat16
    sizes = parallel.tensor_parallel_size, 1, parallel.pipeline_parallel_size, parallel.expert_parallel_size
    groups = ParallelGroups(Topology(world_size, *sizes), rank=stage * world_size // sizes[2])
    how = {"tensor_parallel_size": groups.tp_size, "device": torch.device("cpu"), "dtype": dtype}
    own = {"matmuls": matmuls_of(cfg.linear, cfg.model, **how)[0], "chunks": chunks_of_stage(cfg, tiny.VOCAB, stage)}
    place = {"vocab_size": tiny.VOCAB, "groups": groups, "dtype": dtype, "seed": None}
    place["activation_checkpointing"] = cfg.training.activation_checkpointing
    return tiny.transformer(cfg.model, cfg.attention, **place, **own)


def numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def weights(block: Block, names: Iterable[str]) -> int:
    """Count the weights of a block's linear layers with these names."""
    return sum(numel(p for p in block.linear_layers[name].parameters() if p.ndim > 1) for name in names)


def check(part: Held, network: Transformer, cfg: RunConfig) -> None:
    """Compare a stage with its plan."""
    sizes, blocks = part.sizes, {number: network.blocks.get_submodule(str(number)) for number in network.numbers}
    state = {name for name, spec in network.specs.items() if spec.kind == "state"}
    assert sizes.parameters == numel(p for name, p in network.named_parameters() if name not in state)
    assert part.num_blocks == len(blocks)
    assert (part.first, part.last) == (network.chunks[0].first, network.chunks[-1].last)
    # Norms and routers are in other units of FSDP (engines/sharding.py).
    mixtures = {n: block.mlp for n, block in blocks.items() if isinstance(block.mlp, MoE)}
    left = {p for block in blocks.values() for norm in block.norms for p in norm.parameters()}
    left |= {p for mlp in mixtures.values() for p in mlp.router.parameters()}
    assert sizes.blocks == tuple(numel(p for p in block.parameters() if p not in left) for block in blocks.values())
    assert sizes.experts == tuple(numel(mlp.experts.parameters()) for mlp in mixtures.values())
    assert sizes.apart == sum(sizes.experts) * (cfg.parallel.expert_parallel_size > 1)
    muon = cfg.optimizer.name == "muon"
    names = [name for name in network.specs if muon and cfg.optimizer.muon.takes(network.specs[name].kind, name)]
    assert elements(part.muon_shapes) == sum(network.specs[name].size for name in names)
    kinds = part.kinds(rank := rank_of(cfg))
    again = {n for n in blocks if n < network.recomputed_blocks}
    layers = Counter((network.layers[n], n in again) for n in blocks)
    found: Counter = Counter()
    for kind in kinds:
        found[kind.layer, kind.rank.recompute == "full"] += kind.blocks
    assert found == layers
    low = sum(weights(block, block.matmuls) for block in blocks.values())
    assert low == sum(n * each.weights for n, each in _matmuls(part, rank) if each.precision.forward in LOW_BIT)


@pytest.mark.parametrize("seed", range(60))
def test_a_stage_is_priced_as_it_is_built(seed: int) -> None:
    cfg, world_size = drawn(seed)
    layout = Layout.of(cfg, world_size)
    parts = [held(cfg, layout, tiny.VOCAB, stage) for stage in range(layout.stages)]
    for stage, part in enumerate(parts):
        check(part, built(cfg, world_size, stage), cfg)
    likes = [(part.sizes.parameters, *sorted(part.sizes.blocks)) for part in parts]
    assert {likes[stage] for stage in different_stages(cfg, tiny.VOCAB)} == {*likes}, "an unlike stage is left out"


PATTERNS = [
    {"model": {"value_embeddings": True}, "linear": {"precision": "int8", "keep_first_blocks": 2}},
    {"model": {"experts": {"number": 4, "per_token": 2, "ffn_size": 128, "dense_layers": 2}}},
]


@pytest.mark.parametrize("sections", PATTERNS)
def test_a_stage_keeps_the_activations_of_its_blocks(sections: dict) -> None:
    """The memory of what autograd saves is added up over the blocks of each stage. The first block is recomputed, and
    keeps its input."""
    sections["model"] |= {"num_layers": 6, "num_key_value_heads": 2}
    how = {**sections, "attention": {"backend": "sdpa"}, "training": {"compile": "off"}}
    saved = [saved_bytes_per_token(run_config(**how), False, number=number) for number in range(6)]
    saved[0] = 2 * 256
    how["training"] = {"compile": "off", "activation_checkpointing": 1}
    cfg = run_config(
        **how, parallel={"pipeline_parallel_size": 2, "pipeline_chunks": 2, "pipeline_blocks": [1, 1, 3, 1]}
    )
    for stage, own in enumerate(([0, 2, 3, 4], [1, 5])):
        kept, _ = _activations(held(cfg, Layout.of(cfg, 2), VOCAB, stage), rank_of(cfg))
        assert kept.bytes / 512 == pytest.approx(sum(saved[number] for number in own), rel=0.005), stage
