"""The probe of quantized attention: its errors and biases agree with known ones at every layout."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.config.schema import StabilityConfig
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import MASKED, Batch
from sagetrain.engines.protocol import Observers, every
from sagetrain.engines.step import Engine
from sagetrain.model.backends import AttentionFunction, Reference, Sage, attention_function
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Gradients, Transformer, gradients
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Taken
from sagetrain.stability.noise_scale import NoiseScale
from sagetrain.stability.quant_noise import QuantizationProbe, QuantNoise
from sagetrain.stability.spikes import METRIC

CPU = torch.device("cpu")


class Numbers(torch.nn.Module):
    """A model with loss = weight . x for a given x, or weight . 0 where attention is exact. The error of the gradient
    is x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=torch.float64))
        self.specs = self.every_spec = {"weight": tiny.spec(width)}
        self.config = tiny.config(1).model
        self.quantized, self.groups = True, ParallelGroups.single()

    @contextmanager
    def exact(self, attention: AttentionFunction) -> Iterator[None]:
        self.quantized = False
        yield
        self.quantized = True

    def run(self, x: Tensor) -> Tensor:
        return self.weight @ (x if self.quantized else torch.zeros_like(x))


def passes(losses: Sequence[Callable[[], Tensor]]) -> list[Gradients]:
    """Return what a probe runs of these losses."""
    return [partial(gradients, loss) for loss in losses]


@pytest.mark.parametrize(("micro_batches", "ranks"), [(2, 1), (1, 2)])
def test_the_memory_of_a_probe_is_as_planned(micro_batches: int, ranks: int) -> None:
    """The run has almost no tokens, so the memory is that of gradients."""
    stability = {"quant_noise": {"every_steps": 5}}
    wide, data = {"hidden_size": 128, "ffn_hidden_size": 256}, {"seq_length": 16, "micro_batch_size": 1}
    cfg = tiny.config(1, "bf16", model=wide, data=data, attention={"backend": "sage"}, stability=stability)
    groups = ParallelGroups.single()
    place = {"vocab_size": tiny.VOCAB, "groups": groups, "dtype": torch.bfloat16, "device": CPU}
    model, tokens = tiny.transformer(cfg.model, cfg.attention, **place), torch.zeros(1, 16, dtype=torch.long)
    probe = QuantizationProbe(model, attention_function("sdpa", cfg.attention, CPU))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        probe.measure(passes([partial(model, tokens, tokens)] * micro_batches))
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    items = memory_per_rank(cfg, ranks, tiny.VOCAB)
    (planned,) = [item.bytes for item in items if item.name == "probe"]
    assert max(itertools.accumulate(changes)) == pytest.approx(planned, rel=0.05)
    without = cfg.model_copy(update={"stability": StabilityConfig()})
    assert "probe" not in [item.name for item in memory_per_rank(without, ranks, tiny.VOCAB)]


def test_a_probe_is_planned_with_kept_16_bit_weights() -> None:
    shape = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
    told = {"model": shape, "data": {"seq_length": 512, "micro_batch_size": 4}, "attention": {"backend": "sage"}}
    told["stability"] = {"quant_noise": {"every_steps": 5}, "monitor": {"every_steps": None}}
    low, wide = (
        {item.name: item.bytes for item in memory_per_rank(cfg, 2, tiny.VOCAB)}
        for cfg in (tiny.config(1, "bf16", linear={"precision": name}, **told) for name in ("int8", "bf16"))
    )
    assert "probe" in low and low.pop("8-bit weights") > 0 and low == wide


def test_a_known_bias_is_found_under_other_errors() -> None:
    """The square |b|^2 is 1. The other errors are 100 times that, and differ in every micro-batch."""
    width, probes = 400, 400
    model = Numbers(width)
    probe = QuantizationProbe(model, Reference())
    assert probe.micro_batches == 2
    draw = torch.Generator().manual_seed(0)
    for length in (1.0, 0.0):
        bias = torch.full((width,), length / width**0.5, dtype=torch.float64)
        found = []
        for _ in range(probes):
            errors = bias + 0.5 * torch.randn(2, width, dtype=torch.float64, generator=draw)
            probe.measure(passes([partial(model.run, error) for error in errors]))
            found.append(model.groups.metrics.reduce(CPU))
            assert found[-1]["quant_noise/head/bias_square"] == pytest.approx((errors[0] @ errors[1]).item(), abs=1e-3)
        errors, biases = (
            torch.tensor([row[f"quant_noise/head/{what}_square"] for row in found]) for what in ("error", "bias")
        )
        # This is the deviation of the mean of biases.
        deviation = (0.25**2 * width + 2 * 0.25 * length**2) ** 0.5 / probes**0.5
        assert biases.mean().item() == pytest.approx(length**2, abs=4 * deviation)
        assert errors.mean().item() == pytest.approx(length**2 + 0.25 * width, rel=0.02)


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 0, 1)])
def test_under_a_mask_the_error_is_right_on_average(counts) -> None:
    """The average is over everything that may be drawn, by brute force: the errors of the counted tokens of every
    micro-batch are drawn in all ways from three errors."""
    tokens = torch.tensor([[1.0, 0.2], [-0.5, 2.0], [0.3, 0.7]], dtype=torch.float64)
    noise, nothing = NoiseScale(4, 0.9), torch.zeros(2, dtype=torch.float64)
    noise.after_step(Taken(1, 0, 8, {"noise/head/small": 2.0, "noise/head/mean": 1.5, "train/counted_share": 0.5}))
    model, total = Numbers(2), sum(counts)
    probe, found, errors = QuantizationProbe(model, Reference()), [], []
    for drawn in itertools.product(range(3), repeat=total):
        left = list(drawn)
        each = [tokens[[left.pop() for _ in range(count)]].mean(0) if count else nothing for count in counts]
        errors.append(sum(error * count / total for error, count in zip(each, counts, strict=True)))
        probe.measure(passes([partial(model.run, error) for error in each]), counts)
        size = 4 * len(counts)
        found.append(Taken(2, 0, size, {**model.groups.metrics.reduce(CPU), "train/counted_share": total / size}))
        QuantNoise(4, noise, 0.9).after_step(found[-1])
    rows = [taken.metrics for taken in found]
    bias, square, ratio = (
        sum(row[f"quant_noise/head/{what}"] for row in rows) / len(rows)
        for what in ("bias_square", "error_square", "ratio")
    )
    assert bias == pytest.approx(tokens.mean(0).square().sum().item())
    harmonic = 1 / (sum(1 / count for count in counts if count) / sum(map(bool, counts)))
    spread = (tokens - tokens.mean(0)).square().sum(1).mean().item()
    assert square == pytest.approx(bias + spread / harmonic)
    shown = [row["quant_noise/head/bias_square"] for row in rows]
    clipped = sum(max(0.0, each) - each for each in shown) / len(rows) * (1 - harmonic / total)
    of_step = torch.stack(errors).square().sum(1).mean().item()
    assert ratio * noise.variance("head") / total == pytest.approx(of_step + clipped)
    assert not any("quant_noise/counted" in row for row in rows)


def test_a_probe_with_fewer_counted_tokens_has_less_bias() -> None:
    """The square |b|^2 is 1, and the rest of one token's error is 1,000. A hundred probes have micro-batches that count
    100 tokens. Then comes one with 10, which leaves the estimate of |b|^2 as it is."""
    noise = NoiseScale(200, 0.9)
    noise.after_step(Taken(1, 0, 800, {"noise/0/small": 2.0, "noise/0/mean": 1.0}))
    ratios = QuantNoise(200, noise, 0.9)
    for tokens in (*[100] * 100, 10):
        error = {"quant_noise/0/error_square": 1 + 1000 / tokens, "quant_noise/0/bias_square": 1.0}
        taken = Taken(2, 0, 800, {**error, "quant_noise/counted": tokens, "train/counted_share": tokens / 200})
        ratios.after_step(taken)
        left = noise.variance("0") / (4 * tokens)
        assert taken.metrics["quant_noise/0/bias_ratio"] * left == pytest.approx(1.0, rel=0.15)


def test_one_counted_micro_batch_gives_no_bias_and_none_nothing() -> None:
    model = Numbers(2)
    probe, one = QuantizationProbe(model, Reference()), torch.ones(2, dtype=torch.float64)
    probe.measure(passes([partial(model.run, one), partial(model.run, 0 * one)]), (3, 0))
    assert model.groups.metrics.reduce(CPU) == {"quant_noise/head/error_square": 2.0, "quant_noise/counted": 3.0}
    probe.measure(passes([partial(model.run, 0 * one)] * 2), (0, 0))
    assert model.groups.metrics.reduce(CPU) == {}


def network(layers: int) -> Transformer:
    shape = {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4}
    cfg = tiny.config(0, model=shape)
    return tiny.transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=ParallelGroups.single())


def runs_of(model: Transformer, count: int) -> list[Callable[[], Tensor]]:
    """Return forward passes of different micro-batches."""
    tokens = torch.randint(0, tiny.VOCAB, (count, 2, tiny.SEQ + 1), generator=torch.Generator().manual_seed(2))
    return [partial(model, each[:, :-1], each[:, 1:]) for each in tokens]


def probed(functions: list[AttentionFunction], count: int = 2) -> dict[str, float]:
    """Return the numbers of a probe of `count` micro-batches on one process."""
    model = network(len(functions))
    model.functions, groups = functions, model.groups

    def adding(run: Callable[[], Tensor]) -> Tensor:
        groups.metrics.sum("of the model", 1.0)
        return run()

    groups.metrics.sum("before", 1.0)
    runs = [partial(adding, run) for run in runs_of(model, count)]
    QuantizationProbe(model, Reference()).measure(passes(runs))
    found = groups.metrics.reduce(CPU)
    assert found.pop("before") == 1 and "of the model" not in found
    assert model.functions == functions
    assert all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_error_and_bias_are_those_of_explicit_gradients(count: int) -> None:
    functions: list[AttentionFunction] = [Sage("paper"), Reference()]
    found, model = probed(functions, count), network(2)
    own = [(name, p) for name, p in model.named_parameters() if name.startswith("blocks.0.")]
    errors = []
    for run in runs_of(model, count):
        each = []
        for model.functions in (functions, [Reference()] * 2):
            each.append(torch.cat([g.flatten() for g in torch.autograd.grad(run(), [p for _, p in own])]).double())
        errors.append(each[0] - each[1])
    products = torch.stack(errors) @ torch.stack(errors).T
    error = products.trace().item() / count
    bias = (products.sum() - products.trace()).item() / (count * (count - 1))
    assert found["quant_noise/0/error_square"] == pytest.approx(error, rel=1e-4)
    assert found["quant_noise/0/bias_square"] == pytest.approx(bias, abs=1e-4 * error)
    assert abs(bias) < 0.2 * error


def test_an_error_that_every_micro_batch_repeats_is_all_bias() -> None:
    model = network(2)
    model.functions = [Sage("paper")] * 2
    QuantizationProbe(model, Reference()).measure(passes(runs_of(model, 1) * 3))
    found = model.groups.metrics.reduce(CPU)
    for layer in ("0", "1", "embedding", "head"):
        error, bias = (found[f"quant_noise/{layer}/{what}_square"] for what in ("error", "bias"))
        assert bias == pytest.approx(error, rel=1e-5) and error > 0, layer


def test_one_micro_batch_says_nothing_about_bias() -> None:
    found = probed([Sage()] * 2, count=1)
    assert found["quant_noise/0/error_square"] > 0
    assert not [name for name in found if name.endswith("bias_square")]


def test_a_layer_in_16_bits_is_left_alone() -> None:
    assert probed([Reference()] * 2) == {}  # There is no probe at all.
    assert probed([Reference(), Sage()])["quant_noise/1/error_square"] > 0


def low_bit(attention: str, **linear: object):
    """Build a configuration whose linear layers are in INT8, wide enough for that."""
    model = {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 2}
    how = {"precision": "int8", **linear}
    return tiny.config(1, "bf16", model=model, linear=how, attention={"backend": attention})


@pytest.mark.parametrize("attention", ["sdpa", "sage"])
def test_the_rounding_of_linear_layers_is_in_the_error(attention: str) -> None:
    """The error is compared with explicit gradients of a model whose linear layers and attention are in 16 bits."""
    cfg = low_bit(attention, keep_last_blocks=1)
    model, exact = (tiny.model(each, ParallelGroups.single()) for each in (cfg, low_bit("sdpa", precision="bf16")))
    assert model.quantized and any(model.matmuls[0].values()) and not model.matmuls[1]
    before = model.matmuls, model.functions
    QuantizationProbe(model, exact.functions[0]).measure(passes(runs_of(model, 2)))
    found = model.groups.metrics.reduce(CPU)
    assert (model.matmuls, model.functions) == before
    rounded, plain = (
        [torch.autograd.grad(run(), list(each.blocks[0].parameters())) for run in runs_of(each, 2)]
        for each in (model, exact)
    )
    errors = torch.stack([
        torch.cat([(a.double() - b.double()).flatten() for a, b in zip(*pair, strict=True)])
        for pair in zip(rounded, plain, strict=True)
    ])  # fmt: skip
    assert found["quant_noise/0/error_square"] == pytest.approx(errors.square().sum().item() / 2, rel=1e-3)
    assert found["quant_noise/0/error_square"] > 0
    model.use_16_bits()
    assert model.quantized == (attention == "sage")


# -- at every layout -----------------------------------------------------------------------------------------------


EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 16, "balance": {"bias_rate": 0.1}}


def config(stage: int, dtype: str = "fp32", tp_size: int = 1, ep_size: int = 1, **model: object):
    shape = {"num_attention_heads": 2, "tie_embeddings": True, **model}
    parallel = {"tensor_parallel_size": tp_size, "sequence_parallel": tp_size > 1, "expert_parallel_size": ep_size}
    return tiny.config(stage, dtype, model=shape, attention={"backend": "sage", "recipe": "paper"}, parallel=parallel)


def batches(groups: ParallelGroups, step: int = 0, sequences: int = 4) -> list[Batch]:
    draw = torch.Generator().manual_seed(step)
    return tiny.batches_of(torch.randint(0, tiny.VOCAB, (sequences, tiny.SEQ + 1), generator=draw), groups)


def probe_of(engine: Engine, chosen: Callable[[TensorSpec], bool] = every) -> QuantizationProbe:
    """Return a probe of the chosen tensors."""
    leaves = {name: leaf for name, leaf in engine.leaves().items() if chosen(engine.model.specs[name])}
    return QuantizationProbe(engine.model, Reference(), leaves)


CASES: dict[str, Callable[[TensorSpec], bool]] = {
    "plain": every,
    "masked": every,
    "experts": lambda spec: spec.of_own_tokens,  # Their errors are small beside others.
    "spread": lambda spec: spec.cut != "experts",
    "spread, masked": lambda spec: spec.of_own_tokens and spec.cut != "experts",
}
"""The tensors that are probed in one process: of a dense model and of a mixture, without and with a loss mask."""
SPREAD = {"spread": every, "spread, masked": CASES["experts"]}
"""The tensors that a probe is given where ranks have experts between them, and so leaves out some."""


def measured(layouts: list[tuple[int, int, int, int]]) -> list[tuple[tuple, str, dict[str, float]]]:
    """Return the numbers of a probe of two micro-batches in all at each (tp, cp, stage, ep) for each of CASES. Those of
    experts that ranks have between them are for the layouts where they do, and for one process."""
    results = []
    for layout, case in itertools.product(layouts, CASES):
        tp_size, cp_size, stage, ep_size = layout
        if ("spread" in case) < (ep_size > 1) or ("spread" in case and ep_size == 1 < dist.get_world_size()):
            continue
        groups, dense = tiny.join(tp_size, cp_size, 1, ep_size), case in ("plain", "masked")
        experts = {} if dense else {"tp_size": tp_size, "ep_size": ep_size, "experts": EXPERTS}
        engine = tiny.engine(config(stage, **experts), groups)
        own, counted = batches(groups, sequences=2), None
        probe = probe_of(engine, SPREAD[case] if ep_size > 1 else CASES[case])
        if "masked" in case:
            counted = tiny.SEQ + 5
            for number, batch in enumerate(own):
                batch.labels = batch.labels.clone()
                if groups.dp_rank + number * groups.dp_size:  # This is the second micro-batch of all ranks.
                    batch.labels[:, 5:] = MASKED
        while (result := engine.step(own, len(own), 1e-2, Observers(probes=[probe]), counted)).room:
            pass  # It is taken again, because rows of experts had no room.
        found = {name: value for name, value in result.metrics.items() if name.startswith("quant_noise/")}
        results.append((layout, case, found))
    return results


def test_the_errors_are_the_same_at_every_layout() -> None:
    """The errors agree to 2 %. Sums in another order change the last bit of an activation, and now and then a rounding
    to INT8."""
    of_two = [(1, 1, 1, 1), (1, 1, 2, 1), (2, 1, 0, 1), (2, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2)]
    worlds = {1: [(1, 1, 0, 1)], 2: of_two, 4: [(2, 1, 0, 4), (1, 2, 1, 4), (2, 1, 2, 2), (1, 2, 3, 2)]}
    rows = [
        row for world, layouts in worlds.items() for rank in run_distributed(measured, world, layouts) for row in rank
    ]
    references = {case: found for _, case, found in rows[: len(CASES)]}
    assert {name.split("/")[1] for name in references["plain"]} == {"embedding", "0", "1", "head"}
    assert references["masked"]["quant_noise/counted"] == pytest.approx(2 / (1 / tiny.SEQ + 1 / 5))
    for layout, case, found in rows:
        for name, value in references[case].items():
            error = references[case][name.replace("bias", "error")]
            assert found[name] == pytest.approx(value, abs=2e-2 * error), (layout, case, name)


# -- the ratio -----------------------------------------------------------------------------------------------------


def test_the_ratio_is_the_error_over_the_noise_that_is_left() -> None:
    """Micro-batches have 10 tokens, and a step has 8 of them. tr(S) is 40 by a measurement of 4 micro-batches."""
    noise = NoiseScale(10, decay=0.9)
    ratios = QuantNoise(10, noise, decay=0.9)
    first = Taken(1, 0, 80, {"quant_noise/0/error_square": 0.5, "quant_noise/0/bias_square": 0.1})
    assert ratios.after_step(first) == []
    assert "quant_noise/0/ratio" not in first.metrics  # The noise is not known yet.
    noise.after_step(Taken(2, 0, 40, {"noise/0/small": 5.0, "noise/0/mean": 2.0}))
    probed = Taken(3, 0, 80, {"quant_noise/0/error_square": 0.5, "quant_noise/0/bias_square": 0.1})
    ratios.after_step(probed)
    left = 40 / 80
    assert probed.metrics["quant_noise/0/ratio"] == pytest.approx((0.1 + 0.4 / 8) / left)
    assert probed.metrics["quant_noise/all/bias_ratio"] == pytest.approx(0.1 / left)
    assert probed.metrics["quant_noise/all/bias_to_gradient"] == pytest.approx(0.1)  # |G|^2 = (4 * 2 - 5) / 3
    later = Taken(4, 0, 80, {"quant_noise/0/error_square": 0.2, "quant_noise/0/bias_square": -0.3})
    again = QuantNoise(10, noise, decay=0.9)
    again.restore(ratios.state())
    for controller in (
        ratios,
        again,
    ):  # The shares are 0.2 of the error twice, and -1.5 of it once. The smaller the weight, the older the probe.
        taken = Taken(4, 0, 80, dict(later.metrics))
        controller.after_step(taken)
        share = (0.81 * 0.2 + 0.9 * 0.2 - 1.5) / (0.81 + 0.9 + 1)
        assert taken.metrics["quant_noise/0/bias_ratio"] == pytest.approx(share * 0.2 / left)
        assert taken.metrics["quant_noise/0/ratio"] == pytest.approx(0.2 / 8 / left)  # A share below 0 counts as none.
    # The estimate |G|^2 is below 0, so there is only noise.
    noise.after_step(Taken(5, 0, 40, {"noise/0/small": 5000.0, "noise/0/mean": 2.0}))
    taken = Taken(5, 0, 80, dict(later.metrics))
    ratios.after_step(taken)
    assert "quant_noise/0/ratio" in taken.metrics and "quant_noise/0/bias_to_gradient" not in taken.metrics
    without = Taken(5, 0, 80, {"train/loss": 1.0})
    assert ratios.after_step(without) == []
    assert without.metrics == {"train/loss": 1.0}


def test_a_spike_that_is_trained_on_changes_no_average() -> None:
    """The spike's gradient is ten times as large. In the averages the noise would seem a hundred times as large for
    hundreds of steps, and noise_aware would take more tokens per step."""
    noise = NoiseScale(10, decay=0.9)
    ratios = QuantNoise(10, noise, decay=0.9)
    measured = {
        "noise/0/small": 5.0, "noise/0/mean": 2.0, "quant_noise/0/error_square": 0.5, "quant_noise/0/bias_square": 0.1,
    }  # fmt: skip
    plain, spike = (
        Taken(1, 0, 40, dict(measured)),
        Taken(2, 0, 40, {name: 100 * value for name, value in measured.items()}),
    )
    spike.metrics[METRIC] = 1.0
    for taken in (plain, spike):
        before = deepcopy((noise.state(), ratios.state()))
        noise.after_step(taken)
        ratios.after_step(taken)
    assert (noise.state(), ratios.state()) == before and noise.variance("0") == pytest.approx(40)
    assert "quant_noise/0/ratio" in plain.metrics
    assert spike.metrics == {METRIC: 1.0, "quant_noise/0/error_square": 50.0, "quant_noise/0/bias_square": 10.0}
    lost = Taken(3, 0, 40, {"quant_noise/0/error_square": math.nan, "quant_noise/0/bias_square": 0.1})
    ratios.after_step(lost)  # Values that are no number do not change them either.
    assert ratios.state() == before[1] and "quant_noise/0/ratio" not in lost.metrics
