"""The gradient noise scale agrees with gradients of single micro-batches, at every layout and ZeRO stage."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.data.batch import MASKED, Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Taken
from sagetrain.stability.noise_scale import GradientNoise, NoiseScale

MICRO_BATCHES = 4


def config(stage: int, dtype: str = "fp32", engine: str = "fsdp"):
    sections = {"model": {"num_attention_heads": 4, "tie_embeddings": True}, "optimizer": {"clip_grad": 0.05}}
    return tiny.config(stage, dtype, parallel={"engine": engine}, **sections)


def global_batch() -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, tiny.VOCAB, (MICRO_BATCHES, tiny.SEQ + 1), generator=draw)


def squares_of(gradients: dict[str, torch.Tensor], model: Transformer) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, gradient in gradients.items():
        layer = str(model.specs[name].layer)
        found[layer] = found.get(layer, 0.0) + gradient.double().square().sum().item()
    return found


def by_hand() -> dict[str, float]:
    """Return the mean square of the micro-batches' gradients, and the square of their mean, in float64, on one
    process."""
    model = tiny.model(config(0), ParallelGroups.single()).double()
    each = []
    for row in global_batch():
        model.zero_grad()
        model(row[None, :-1], row[None, 1:]).backward()
        each.append({name: p.grad.clone() for name, p in model.named_parameters()})
    mean = {name: torch.stack([gradients[name] for gradients in each]).mean(0) for name in each[0]}
    small = [squares_of(gradients, model) for gradients in each]
    found = {f"noise/{layer}/small": sum(s[layer] for s in small) / len(small) for layer in small[0]}
    return found | {f"noise/{layer}/mean": square for layer, square in squares_of(mean, model).items()}


def measured(layouts: list[tuple]) -> list[tuple[tuple, dict[str, float], float]]:
    """Return the measurements and the loss of the last of two or, if compiled, three steps at each (tp, cp, stage,
    dtype, compile backend, sequence parallel, engine if it is not FSDP). The learning rate is 0."""
    results = []
    for layout in layouts:
        tp_size, cp_size, stage, dtype, backend, sequence, *engine = layout
        torch._dynamo.reset()
        cfg, groups = config(stage, dtype, *engine), tiny.join(tp_size, cp_size)
        again = "full" if sequence else "none"
        model = tiny.model(cfg, groups, sequence_parallel=sequence, overlap=not backend, activation_checkpointing=again)
        if backend:
            tiny.compile_first_rank(model, backend)
        engine = build_engine(tiny.on(cfg, groups), model)
        noise = GradientNoise(engine.leaves(), engine.model.specs.values(), groups, engine.device)
        batches = tiny.batches_of(global_batch(), groups)
        graphs = []
        for watch in (None, noise, noise) if backend else (noise, noise):
            result = engine.step(batches, len(batches), 0.0, Observers(noise=watch))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(set(graphs)) == 1  # Hooks on parameters cause no new compilation.
        results.append((layout, result.metrics, result.loss))
    return results


WORLDS = {
    1: [(1, 1, 1, "fp32", "", False), (1, 1, 1, "bf16", "", False)],
    2: [
        *((1, 1, stage, "fp32", "", False) for stage in range(4)),
        (2, 1, 0, "fp32", "", False),
        (2, 1, 3, "fp32", "", True),
        (1, 2, 1, "fp32", "", False),
        (1, 2, 3, "fp32", "", False),
        (1, 1, 1, "fp32", "eager", False),  # It makes the same graphs.
        (1, 1, 3, "fp32", "aot_eager", False),
        (1, 1, 3, "bf16", "", False),
    ],
    4: [(2, 1, 2, "fp32", "", True), (2, 2, 0, "fp32", "", False)],
}


@pytest.mark.parametrize("world", WORLDS)
def test_squares_are_those_of_explicit_gradients(world: int) -> None:
    """The squares agree at every layout. In fp32 the distance is fp32's rounding. In bf16 it is that of gradients with
    8 bits, each of which is off by up to 2^-9."""
    exact = by_hand()
    assert exact["noise/0/small"] > 2 * exact["noise/0/mean"]  # There is noise to be seen.
    for rank in run_distributed(measured, world, WORLDS[world]):
        for layout, metrics, _ in rank:
            found = {name: value for name, value in metrics.items() if name.startswith("noise/")}
            assert found == pytest.approx(exact, rel=2e-5 if layout[3] == "fp32" else 2e-2), layout


class Known(torch.nn.Module):
    """A model with loss = weight . x. The gradient of a micro-batch is x, of known mean and covariance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width))
        self.specs = {"weight": tiny.spec(width)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


def test_the_estimates_of_a_known_covariance() -> None:
    """g = G + noise of covariance S / b, with b = 8 tokens. The test averages both estimates and their quotient over
    400 steps of 4 micro-batches. The spread of one estimate of tr(S) is sqrt(2 / (3 width)) of it."""
    width, tokens, n, groups = 64, 8, 4, ParallelGroups.single()
    model, scale = Known(width), NoiseScale(tokens, decay=0.995)
    noise = GradientNoise(dict(model.named_parameters()), model.specs.values(), groups, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    deviations, true = torch.linspace(0.5, 2, width), torch.full((width,), 0.3)
    for step in range(400):
        gradients = true + deviations / tokens**0.5 * torch.randn(n, width, generator=draw)
        for x in gradients:
            with noise.micro_batch():
                (model(x) / n).backward()
        noise.of_step([("weight", gradients.mean(0) * 0.25)])
        noise.finish(n, clipping=0.25, copies=1)
        taken = Taken(step + 1, 0, n * tokens, groups.metrics.reduce(torch.device("cpu")))
        assert scale.after_step(taken) == []
    variance, square = deviations.square().sum().item(), true.square().sum().item()
    assert taken.metrics["noise/head/variance"] == pytest.approx(variance, rel=0.02)
    assert taken.metrics["noise/head/gradient_square"] == pytest.approx(square, rel=0.1)
    assert taken.metrics["noise/all/scale_tokens"] == pytest.approx(variance / square, rel=0.1)
    assert not [name for name in taken.metrics if name.endswith(("/small", "/mean"))]


def estimated(gradients: list[torch.Tensor], counts: Sequence[int], scale: NoiseScale) -> dict[str, float]:
    """Return the estimates from gradients of micro-batches. Each gradient is the mean over its tokens that count."""
    groups, model, n = ParallelGroups.single(), Known(len(gradients[0])), len(counts)
    noise = GradientNoise(dict(model.named_parameters()), model.specs.values(), groups, torch.device("cpu"))
    for gradient, count in zip(gradients, counts, strict=True):
        noise.count(count)
        with noise.micro_batch():
            (model(gradient) * count / sum(counts)).backward()
    noise.of_step([("weight", model.weight.grad)])
    noise.finish(n, clipping=1.0, copies=1)
    taken = Taken(1, 0, n * 4, groups.metrics.reduce(torch.device("cpu")))
    assert scale.after_step(taken) == []
    return taken.metrics


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 1, 0), (1, 2, 1)])
def test_under_a_mask_both_estimates_are_right_on_average(counts) -> None:
    """The average is over everything that may be drawn, by brute force: the counted tokens of every micro-batch are
    drawn in all ways from three gradients."""
    tokens = torch.tensor([[1.0, 0.0], [-0.5, 2.0], [0.0, 0.7]])
    mean = tokens.mean(0)
    found = []
    for drawn in itertools.product(range(3), repeat=sum(counts)):
        each = [tokens[list(part)].mean(0) if part else mean for part in split(drawn, counts)]
        found.append(estimated(each, counts, NoiseScale(4, decay=0.5)))
    variance, square = (sum(row[f"noise/all/{what}"] for row in found) / len(found) for what in NUMBERS)
    assert variance == pytest.approx((tokens - mean).square().sum(1).mean().item(), rel=1e-5)
    assert square == pytest.approx(mean.square().sum().item(), rel=1e-5)
    assert not [name for name in found[0] if "counted" in name]


NUMBERS = "variance", "gradient_square"


def split(drawn: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the draws of one micro-batch after the other."""
    drawn = iter(drawn)
    for count in counts:
        yield tuple(itertools.islice(drawn, count))


def test_a_step_with_little_information_weighs_little() -> None:
    """A step with one micro-batch that counts says nothing of the noise. Other steps weigh by how evenly their
    micro-batches count. scale_tokens are those of tokens_per_step."""
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    scale = NoiseScale(4, decay=0.5)
    assert estimated([one, other], (3, 0), scale) == {} and scale.variance("all") is None
    even = estimated([one, other], (4, 4), scale)  # tr(S) = 8 / 1 (1 - 0.5), |G|^2 = 0
    assert [even[f"noise/all/{what}"] for what in NUMBERS] == pytest.approx([4.0, 0.0], abs=1e-6)
    uneven = estimated([one, one], (4, 1), scale)  # tr(S) = 0, |G|^2 = 1, and a weight of 16 / 25
    weight = 2 - 2 * 17 / 25
    shares = [4.0 * 0.5 / (0.5 + weight), weight / (0.5 + weight)]
    assert [uneven[f"noise/all/{what}"] for what in NUMBERS] == pytest.approx(shares)
    assert uneven["noise/all/scale_tokens"] == pytest.approx(4.0 * 0.5 / weight * 8 / 5)


def masked(layouts: list[tuple[int, int, int]]) -> list[tuple[tuple, dict[str, float], float]]:
    """Return the estimates at each (tp, cp, stage) for micro-batches that have the same mean gradient and count
    unevenly."""
    results = []
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, tiny.VOCAB, (1, tiny.SEQ + 1), generator=draw).expand(3, -1)
    for layout in layouts:
        groups = tiny.join(*layout[:2])
        engine = tiny.engine(tiny.config(layout[2], optimizer={"clip_grad": 0.5}), groups)
        batches, rows = [], (3, 1, 0, 2)
        for counted in rows[groups.dp_rank :: groups.dp_size]:
            labels = tokens[:, 1:].clone()
            labels[counted:] = MASKED
            batches.append(Batch(tokens[:, :-1], labels, None, None, None, [], divisor=1.0))
        observers = Observers(noise=GradientNoise(engine.leaves(), engine.model.specs.values(), groups, engine.device))
        result = engine.step(batches, len(batches), 0.0, observers, sum(rows) * tiny.SEQ)
        NoiseScale(3 * tiny.SEQ, 0.9).after_step(Taken(1, 0, len(rows) * 3 * tiny.SEQ, result.metrics))
        results.append((layout, result.metrics, result.grad_norm))
    return results


def test_equal_gradients_have_no_noise_under_uneven_counts() -> None:
    for world, layouts in {1: [(1, 1, 0)], 2: [(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 1)]}.items():
        for rank in run_distributed(masked, world, layouts):
            for layout, metrics, norm in rank:
                assert metrics["noise/all/gradient_square"] == pytest.approx(norm**2, rel=1e-5), layout
                assert abs(metrics["noise/all/variance"]) < 1e-3 * norm**2, layout


def test_the_first_measurement_counts_alone_then_averages() -> None:
    def step(small: float, mean: float) -> dict[str, float]:
        taken = Taken(1, 0, 40, {"noise/0/small": small, "noise/0/mean": mean})
        scale.after_step(taken)
        return taken.metrics

    scale = NoiseScale(10, decay=0.5)  # A step has 4 micro-batches.
    assert step(5.0, 2.0) == pytest.approx({
        **{f"noise/{layer}/variance": 40.0 for layer in ("0", "all")},
        **{f"noise/{layer}/gradient_square": 1.0 for layer in ("0", "all")},
        **{f"noise/{layer}/scale_tokens": 40.0 for layer in ("0", "all")},
    })  # fmt: skip
    later = step(9.0, 6.0)  # The values are 40 and 5, and the newer one counts twice.
    assert later["noise/0/gradient_square"] == pytest.approx((1 + 2 * 5) / 3)
    again = NoiseScale(10, decay=0.5)
    again.restore(json.loads(json.dumps(scale.state())))
    assert again.variance("0") == scale.variance("0") == pytest.approx(40)
    assert "noise/0/scale_tokens" not in step(40.0, 1.0)  # On average there is no gradient, so there is no quotient.
    again.restore({})
    assert again.variance("0") is None


def test_a_step_without_counted_tokens_measures_no_noise() -> None:
    scale = NoiseScale(1, decay=0.5)
    for small, share in ((4.0, 0.1), (0.0, 0.0)):
        scale.after_step(
            Taken(1, 2, 2, {"noise/0/small": small, "noise/0/mean": small / 2, "train/counted_share": share})
        )
    assert scale.variance("0") == 4.0


def test_sums_over_layers_are_the_same_in_every_process() -> None:
    """The order of a set depends on the hashes of its names. They differ between processes, and from name to name."""
    said = set()
    for name in "ABCDEFGH":
        draw, scale = random.Random(0), NoiseScale(1, 0.9)
        layers = [f"{name}{layer}" for layer in range(40)]
        scale.after_step(
            Taken(1, 4, 4, {f"noise/{layer}/{of}": draw.random() for layer in layers for of in ("small", "mean")})
        )
        said.add(str(scale.state()).replace(f"'{name}", "'"))
    assert len(said) == 1
