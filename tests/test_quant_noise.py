"""The probe of quantized attention: its errors and biases where they are known, at every layout, and that a step with
one is the step without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.data.loader import Batch
from sagetrain.model.backends import AttentionFunction, Reference, Sage, TokenLayout, token_layout
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Taken
from sagetrain.stability.noise_scale import NoiseScale
from sagetrain.stability.quant_noise import QuantizationProbe, QuantNoise, Rotated, random_rotation
from sagetrain.train import engine as engine_module
from sagetrain.train.step import Observers

CPU = torch.device("cpu")


def rotated(function: AttentionFunction, size: int = 16) -> Rotated:
    return Rotated(function, random_rotation(size, 0, "scores"), random_rotation(size, 0, "values"))


def test_rotations_are_orthogonal_and_named() -> None:
    rotation = random_rotation(16, 3, "a")
    assert torch.allclose(rotation @ rotation.T, torch.eye(16), atol=1e-6)
    assert random_rotation(16, 3, "a").equal(rotation)
    assert not random_rotation(16, 3, "b").equal(rotation)


def test_between_rotations_attention_is_the_same_and_int8_rounds_otherwise() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 32, heads, 16, generator=draw) for heads in (4, 2, 2, 4))
    layout = token_layout({"cu_seqlens"}, 2, 64, None, None, None, None)

    def results(function: AttentionFunction) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = function(*leaves, layout)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    for plain, turned in zip(results(Reference()), results(rotated(Reference())), strict=True):
        assert torch.allclose(plain, turned, atol=1e-5)
    assert rotated(Sage()).documents == "bounds"
    for exact, plain, turned in zip(results(Reference()), results(Sage()), results(rotated(Sage())), strict=True):
        error = (turned - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.05
        assert (turned - plain).norm() / exact.norm() > 1e-3


class Scaled(AttentionFunction):
    """Attention off by a part of itself in every channel: alike whatever the rotation, or nothing on average."""

    quantized = frozenset({"P V"})

    def __init__(self, signs: Tensor) -> None:
        self.signs = signs

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        return Reference()(q, k, v, layout) * (1 + 1e-3 * self.signs)


def probed(functions: list[AttentionFunction], steps: range = range(1)) -> list[dict[str, float]]:
    """Of one process, the numbers of a probe at each of the steps."""
    shape = {"num_layers": len(functions), "hidden_size": 64, "num_attention_heads": 4}
    cfg, groups = tiny.config(0, model=shape), ParallelGroups.single()
    model = Transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=groups, functions=functions)
    probe = QuantizationProbe(model, Reference(), groups, CPU, seed=1)
    tokens = torch.randint(0, tiny.VOCAB, (2, tiny.SEQ + 1), generator=torch.Generator().manual_seed(2))
    found = []
    for step in steps:
        groups.metrics.sum("stray", 1.0)
        probe.measure(step, lambda: model(tokens[:, :-1], tokens[:, 1:]))
        found.append(groups.metrics.reduce(CPU))
        assert ("stray" in found[-1]) == (len(found[-1]) == 1)
    assert [block.attention.function for block in model.blocks] == functions
    assert all(p.grad is None for p in model.parameters())
    return found


def test_an_error_that_no_rotation_changes_is_all_bias_and_one_that_each_makes_anew_is_none() -> None:
    same = probed([Scaled(torch.ones(16))] * 2)[0]
    assert same["quant_noise/0/error_square"] > 0
    for layer in ("0", "1", "embedding", "head"):
        error, bias = (same[f"quant_noise/{layer}/{what}_square"] for what in ("error", "bias"))
        assert bias == pytest.approx(error, rel=1e-2), layer  # fp32 differences of a thousandth
    signs = torch.ones(16)
    signs[::2] = -1  # rotated: a matrix without trace, its mean over all rotations 0
    other = probed([Scaled(signs)] * 2, range(20))
    errors, biases = (sum(row[f"quant_noise/1/{what}_square"] for row in other) for what in ("error", "bias"))
    assert abs(biases) < 0.1 * errors  # of 20, each with a spread of about .16 (2 layers) of its error


def test_a_layer_in_16_bits_is_left_alone() -> None:
    assert probed([Reference()] * 2) == [{"stray": 1.0}]  # no probe at all
    found = probed([Reference(), Sage()])[0]
    assert found["quant_noise/1/error_square"] > 0


def test_the_bias_of_int8_attention_is_that_of_many_rotations() -> None:
    """Squared mean error over 30 passes, less what their spread leaves in it, against 15 probes of two."""
    rows = probed([Sage("paper")] * 2, range(15))
    error = sum(row["quant_noise/1/error_square"] for row in rows) / len(rows)
    bias = sum(row["quant_noise/1/bias_square"] for row in rows) / len(rows)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    cfg, groups = tiny.config(0, model=shape), ParallelGroups.single()
    model = Transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=groups)
    tokens = torch.randint(0, tiny.VOCAB, (2, tiny.SEQ + 1), generator=torch.Generator().manual_seed(2))

    def gradient(function: AttentionFunction | None, seed: int = 0) -> Tensor:
        for layer, block in enumerate(model.blocks):
            matrices = (random_rotation(16, seed, f"{layer} {what}") for what in "sv")
            block.attention.function = Rotated(function, *matrices) if function else Reference()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.blocks[1].parameters()))])

    exact = gradient(None)
    errors = torch.stack([gradient(Sage("paper"), seed) - exact for seed in range(30)]).double()
    count, squares = len(errors), errors.square().sum().item()
    assert error == pytest.approx(squares / count, rel=0.05)
    expected = (errors.sum(0).square().sum().item() - squares) / (count * (count - 1))
    assert bias == pytest.approx(expected, abs=0.05 * error)
    assert 0.05 * error < bias < 0.95 * error  # so that neither would pass for the other


# -- at every layout -----------------------------------------------------------------------------------------------


def config(stage: int, dtype: str = "fp32", **model: int):
    shape = {"num_attention_heads": 2, "tie_embeddings": True, **model}
    return tiny.config(stage, dtype, model=shape, attention={"backend": "sage", "recipe": "paper"})


def batches(groups: ParallelGroups, step: int = 0, sequences: int = 4) -> list[Batch]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, tiny.VOCAB, (sequences, tiny.SEQ + 1), generator=draw)
    return [
        Batch(row[None, :-1], row[None, 1:], positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=[])
        for row in tokens[groups.dp_rank :: groups.dp_size]
    ]


def probe_of(engine: engine_module.Engine, step: int):
    probe = QuantizationProbe(engine.module, Reference(), engine.groups, engine.device, seed=1)
    return lambda run: probe.measure(step, run)


def measured(layouts: list[tuple[int, int, int]]) -> list[tuple[tuple, dict[str, float]]]:
    """What a probe finds at each (tp, cp, stage); data-parallel ranks have the same micro-batch."""
    results = []
    for layout in layouts:
        groups = tiny.join(*layout[:2])
        engine = tiny.engine(config(layout[2]), groups)
        same = batches(ParallelGroups.single(), sequences=1)
        found = engine.step(same, 1, 1e-2, False, Observers(probe=probe_of(engine, 5))).metrics
        results.append((layout, {name: value for name, value in found.items() if name.startswith("quant_noise/")}))
    return results


def test_the_errors_are_the_same_at_every_layout() -> None:
    """To 2 %: sums in another order change the last bit of an activation, and then now and then a rounding to INT8."""
    worlds = {1: [(1, 1, 0)], 2: [(1, 1, 1), (1, 1, 2), (2, 1, 0), (2, 1, 2), (1, 2, 1)]}
    rows = [
        row for world, layouts in worlds.items() for rank in run_distributed(measured, world, layouts) for row in rank
    ]
    _, reference = rows[0]
    assert {name.split("/")[1] for name in reference} == {"embedding", "0", "1", "head"}
    assert reference["quant_noise/0/bias_square"] > 0
    for layout, found in rows:
        assert found == pytest.approx(reference, rel=2e-2), layout


def run_of(layout: tuple[int, int, int, str, str, str], probes: bool) -> tuple[list, list[Tensor]]:
    """Losses and norms of four steps of (tp, cp, stage, dtype, compile backend, recompute), and the weights after."""
    tp_size, cp_size, stage, dtype, backend, recompute = layout
    groups, cfg = tiny.join(tp_size, cp_size), config(stage, dtype)
    model = Transformer(
        cfg.model,
        cfg.attention,
        vocab_size=tiny.VOCAB,
        groups=groups,
        seed=3,
        activation_checkpointing=recompute,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
    )
    if backend:
        model.compile_blocks(backend)
    engine = engine_module.Engine(cfg, model, groups, 1)
    numbers = []
    for step in range(4):
        own = batches(groups, step)
        probe = probe_of(engine, step) if probes and step % 2 else None
        result = engine.step(own, len(own), 1e-2, False, Observers(probe=probe))
        numbers.append((result.loss, result.grad_norm))
        assert ("quant_noise/0/error_square" in result.metrics) == bool(probe)
    return numbers, [shard.tensors["weight"].clone() for shard in engine.shards() if shard.tensors]


def with_and_without(layouts: list[tuple]) -> list[tuple[tuple, bool]]:
    """Whether the run with probes is the one without to the last bit."""
    results = []
    for layout in layouts:
        (numbers, weights), (others, other_weights) = (run_of(layout, probes) for probes in (True, False))
        same = all(a.equal(b) for a, b in zip(weights, other_weights, strict=True))
        results.append((layout, numbers == others and same))
    return results


LAYOUTS = {
    1: [(1, 1, 0, "fp32", "", "none"), (1, 1, 1, "bf16", "", "full"), (1, 1, 1, "fp32", "aot_eager", "none")],
    2: [
        (1, 1, 0, "fp32", "", "none"),
        (1, 1, 1, "bf16", "", "none"),
        (1, 1, 2, "fp32", "", "full"),
        (2, 1, 1, "fp32", "aot_eager", "none"),
        (1, 2, 2, "fp32", "", "none"),
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_probe_leaves_the_step_as_it_is_to_the_last_bit(world: int) -> None:
    for rank in run_distributed(with_and_without, world, LAYOUTS[world]):
        assert rank == [(layout, True) for layout in LAYOUTS[world]]


# -- the ratio -----------------------------------------------------------------------------------------------------


def test_the_ratio_is_the_error_of_the_step_over_the_noise_that_is_left() -> None:
    """Micro-batches of 10 tokens, 8 of them a step; tr(S) 40 by a measurement of 4 micro-batches."""
    noise = NoiseScale(10, decay=0.9)
    ratios = QuantNoise(10, noise)
    first = Taken(1, 0, 80, {"quant_noise/0/error_square": 0.5, "quant_noise/0/bias_square": 0.1})
    assert ratios.after_step(first) == []
    assert "quant_noise/0/ratio" not in first.metrics  # the noise is not known yet
    noise.after_step(Taken(2, 0, 40, {"noise/0/small": 5.0, "noise/0/mean": 2.0}))
    probed = Taken(3, 0, 80, {"quant_noise/0/error_square": 0.5, "quant_noise/0/bias_square": 0.1})
    ratios.after_step(probed)
    left = 40 / 80
    assert probed.metrics["quant_noise/0/ratio"] == pytest.approx((0.1 + 0.4 / 8) / left)
    assert probed.metrics["quant_noise/all/bias_ratio"] == pytest.approx(0.1 / left)
    without = Taken(4, 0, 80, {"train/loss": 1.0})
    assert ratios.after_step(without) == []
    assert without.metrics == {"train/loss": 1.0}
