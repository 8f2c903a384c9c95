"""A step that is watched in every way has the bits of a step that nobody watches, and torch compiles nothing for it."""

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.config.schema import MonitorConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.engines.step import Engine
from sagetrain.model.backends import Reference
from sagetrain.stability.linear_errors import LinearErrors
from sagetrain.stability.monitor import Monitor
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.quant_noise import QuantizationProbe

SECTIONS = {
    "model": {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "head_dim": 16,
              "num_key_value_heads": 2, "tie_embeddings": True},
    "linear": {"precision": "fp8"},
}  # fmt: skip
Layout = tuple[int, int, int, str, str, str, str]
"""Tensor-parallel size, context-parallel size, ZeRO stage, dtype, compile backend, recomputation and recipe."""
LAYOUTS: dict[int, list[Layout]] = {
    1: [(1, 1, 0, "fp32", "aot_eager", "none", "fine"), (1, 1, 1, "bf16", "", "full", "paper")],
    2: [
        (1, 1, 2, "bf16", "", "full", "paper"),
        (1, 1, 3, "bf16", "", "selective", "paper"),
        (2, 1, 1, "fp32", "eager", "none", "paper"),
        (1, 2, 2, "fp32", "", "none", "paper"),
    ],
}
WATCHES = {"noise", "quant_noise", "quant", "norms"}
"""The first words in the names of the observers' numbers."""


def every_observer(engine: Engine) -> Observers:
    model, groups, device, leaves = engine.model, engine.groups, engine.device, engine.leaves()
    gains = lambda: ((kept.name, kept.weight) for kept in engine.owned())  # noqa: E731
    return Observers(
        noise=GradientNoise(leaves, model.every_spec.values(), groups, device),
        probes=[
            QuantizationProbe(model, Reference(), leaves),
            LinearErrors(model, range(2), leaves),
        ],
        watch=Monitor(MonitorConfig(every_steps=1), model, gains).watch(1),
        layer_norms=True,
    )


def steps_of(layout: Layout, watched: bool) -> tuple[list[dict[str, float]], list[Tensor], int]:
    """Return the numbers of four steps over two documents in each sequence, the weights behind them, and the graphs.
    Every other step is watched; the norms of the last one are measured in any case."""
    tp_size, cp_size, stage, dtype, backend, recompute, recipe = layout
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # With sequence parallelism norms round for the layers behind them.
    parallel = {"tensor_parallel_overlap": "on", "sequence_parallel": tp_size > 1}
    how = {"training": {"activation_checkpointing": recompute}, "parallel": parallel}
    how |= {"attention": {"backend": "sage", "recipe": recipe}}
    cfg, groups = tiny.config(stage, dtype, **how, **SECTIONS), tiny.join(tp_size, cp_size)
    model = tiny.model(cfg, groups)
    if backend:
        tiny.compile_first_rank(model, backend)
    engine = build_engine(tiny.on(cfg, groups), model)
    documents, numbers = torch.tensor([0, 6, tiny.SEQ], dtype=torch.int32), []
    for step in range(4):
        tokens = torch.randint(0, tiny.VOCAB, (4, tiny.SEQ + 1), generator=torch.Generator().manual_seed(step))
        rows = tokens[groups.dp_rank :: groups.dp_size]
        own = [Batch(row[None, :-1], row[None, 1:], None, documents, tiny.SEQ, []) for row in rows]
        observers = every_observer(engine) if watched and step % 2 else Observers(layer_norms=step == 3)
        found = engine.step(own, len(own), 1e-2, observers).metrics
        named = {name.split("/")[0] for name in found} & WATCHES
        assert named == (WATCHES if watched and step % 2 else {"norms"} if step == 3 else set())
        numbers.append({name: x for name, x in found.items() if name.split("/")[0] not in WATCHES - {"norms"}})
    assert all(parameter.requires_grad for parameter in model.parameters())
    numbers[1] = {name: x for name, x in numbers[1].items() if not name.startswith("norms/")}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return numbers, [kept.weight.clone() for kept in engine.owned()], graphs


def with_and_without(layouts: list[Layout]) -> None:
    for layout in layouts:
        (numbers, weights, graphs), (plain, expected, before) = (steps_of(layout, watched) for watched in (True, False))
        assert numbers == plain, layout
        assert {"train/loss", "train/grad_norm", "norms/1/activation"} <= plain[3].keys()
        assert all(map(torch.equal, weights, expected)), layout
        assert graphs == before and (graphs > 0) == (layout[4] != "" and torch.distributed.get_rank() == 0), layout


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_watched_step_is_the_step(world: int) -> None:
    run_distributed(with_and_without, world, LAYOUTS[world])
