"""Flips of choices of experts by 8 bits are counted right, and the model is left as it was."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import tiny
from sagetrain.model.backends import attention_function
from sagetrain.model.compile import compile_blocks
from sagetrain.model.moe import Router
from sagetrain.model.transformer import gradients
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.choices import Flips

EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 32, "dense_layers": 1}


def test_flips_are_those_of_two_passes(monkeypatch) -> None:
    """They are the tokens whose set of experts differs; the order does not matter. Nothing else is left of the passes,
    and a model in 16 bits has none."""
    shape = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 64, "experts": EXPERTS, "init_std": 0.2}
    how = {"attention": {"backend": "sage", "recipe": "paper"}, "linear": {"precision": "fp8"}}
    cfg = tiny.config(1, model=shape, **how)
    groups = ParallelGroups.single()
    model = tiny.model(cfg, groups)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, tiny.VOCAB, (4, 65), generator=draw)
    call = partial(model, tokens[:, :-1], tokens[:, 1:])
    exact = attention_function("sdpa", cfg.attention, torch.device("cpu"))

    chosen, seen = Router.chosen, list[set]()
    with monkeypatch.context() as patch:
        patch.setattr(Router, "chosen", lambda router, scores: seen.append(chosen(router, scores)) or seen[-1])
        call()
        with model.exact(exact):
            call()
    own, wide = seen[:2], seen[2:]
    differ = [
        sum({*a} != {*b} for a, b in zip(one.tolist(), other.tolist(), strict=True)) / 256
        for one, other in zip(own, wide, strict=True)
    ]
    assert 0 < differ[0] < 0.5

    compile_blocks(model, "eager", blocks_alone=True)
    loss, graphs = call(), counters["stats"]["unique_graphs"]
    flips = Flips(model, exact, dict(model.named_parameters()))
    flips.measure([partial(gradients, call)])
    found = groups.metrics.reduce(torch.device("cpu"))
    assert found == pytest.approx({"moe/1/flips": differ[0], "moe/2/flips": differ[1]})
    assert torch.equal(call(), loss) and counters["stats"]["unique_graphs"] == graphs > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(block.mlp.router.watch is None for block in model.blocks if hasattr(block.mlp, "router"))

    alone = tiny.model(tiny.config(1, model=shape), groups)
    Flips(alone, exact, dict(alone.named_parameters())).measure([])
    assert groups.metrics.reduce(torch.device("cpu")) == {}
