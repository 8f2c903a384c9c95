"""The errors of linear layers in 8 bits, measured in a training step, are the same at every layout."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from distributed import run_distributed
from kernel_inputs import cosine, random_choices
from runs import rows_of
from sagekernels.grouped import GATHER_ROWS, plan_rows
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, GroupedMatmul, grouped_matmul
from sagekernels.grouped_products import grouped_product_twin, grouped_weight_product_twin
from sagekernels.lowbit import LOW_BIT
from sagekernels.testing import rel_l2
from sagetrain.config import RunConfig
from sagetrain.config.check import check
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers
from sagetrain.engines.step import Engine
from sagetrain.model.block import Block
from sagetrain.model.transformer import Transformer, gradients
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability import linear_errors, monitor
from sagetrain.stability.controller import Taken
from sagetrain.stability.linear_errors import MUCH, LinearErrors, ObservedExperts, Vanishing
from sagetrain.training import controllers
from trained import make_trainer

LENGTH, SEQUENCES = 64, 4
SHAPE = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
LAYERS = ("qkv", "out", "gate_up", "down")
NUMBERS = {
    *(f"{x}/{metric}" for x in ("Y", "dX", "dW") for metric in ("rel_l2", "cosine")),
    *("dY/zero_share_dX", "dY/zero_share_dW"),
}


def config(stage: int = 0, precision: str = "fp8", **sections: dict) -> RunConfig:
    sections["model"] = SHAPE | sections.get("model", {})
    sections["data"] = {"seq_length": LENGTH, "micro_batch_size": SEQUENCES}
    sections["tokens_per_step"] = {"tokens": LENGTH * SEQUENCES}
    return tiny.config(stage, linear={"precision": precision, "head": precision}, **sections)


def batch(groups: ParallelGroups) -> Batch:
    """Return this rank's share of four sequences."""
    text = torch.randint(0, tiny.VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    text = text.chunk(groups.dp_size)[groups.dp_rank]
    return Batch(text[:, :-1], text[:, 1:], None, None, None, [])


def step(engine: Engine, watched: bool = True) -> dict[str, float]:
    probes = [LinearErrors(engine.model, range(2), engine.leaves())] if watched else []
    return engine.step([batch(engine.groups)], 1, 1e-2, Observers(probes=probes)).metrics


def measured(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.startswith("quant/")}


def numbers(places: list[tuple[int, int, int, dict]]) -> list[dict[str, float]]:
    """Return the numbers of a first step at each layout of a world: tensor and context parallel size, ZeRO stage,
    sections."""
    return [measured(step(tiny.engine(config(stage, **how), tiny.join(tp, cp)))) for tp, cp, stage, how in places]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, float]:
    return run_distributed(numbers, 1, [(1, 1, 0, {})])[0][0]


def test_the_names_and_their_ranges(one_rank) -> None:
    layers = [*(f"{number}/{name}" for number in (0, 1) for name in LAYERS), "head/head"]
    assert set(one_rank) == {f"quant/{layer}.{number}" for layer in layers for number in NUMBERS}
    for name, value in one_rank.items():
        if name.endswith("rel_l2"):
            assert 0.01 < value < 0.06, name
        elif name.endswith("cosine"):
            assert 0.998 < value < 1, name
        else:
            assert 0 <= value < 0.1, name


SEQUENCE, HALVES = {"sequence_parallel": True}, {"tensor_parallel_overlap": "on"}
LAYOUTS = {  # These are layouts of two ranks.
    "halves": (2, 1, 0, {"parallel": HALVES}),
    "sequence parallel": (2, 1, 1, {"parallel": SEQUENCE}),
    "sequence parallel, halves, in part recomputed": (
        *(2, 1, 1),
        {"parallel": SEQUENCE | HALVES, "training": {"activation_checkpointing": "selective"}},
    ),
    "context parallel": (1, 2, 1, {}),
    "ZeRO 2, recomputed": (1, 1, 2, {"training": {"activation_checkpointing": "full"}}),
    "ZeRO 3": (1, 1, 3, {}),
    "ZeRO 3, by hooks": (1, 1, 3, {"parallel": {"shard_size": 2}}),
}


def test_the_same_numbers_at_every_layout(one_rank) -> None:
    """Numbers differ only where a share has its own scales: dW has scales of a rank's tokens, and a row may be split
    over ranks."""
    ranks = run_distributed(numbers, 2, [*LAYOUTS.values()])
    for layout, first, second in zip(LAYOUTS, *ranks, strict=True):
        assert first == second and set(first) == set(one_rank), layout
        for name, value in one_rank.items():
            assert first[name] == pytest.approx(value, rel=0.1, abs=2e-3), (layout, name)


def by_hand() -> list[list[tuple[float, float]]]:
    """Return the numbers of Y of the first layer, whose input is known, and the float64 values, for each precision."""
    groups = tiny.join(1)
    return [by_hand_with(precision, groups) for precision in LOW_BIT]


def by_hand_with(precision: str, groups: ParallelGroups) -> list[tuple[float, float]]:
    engine = tiny.engine(config(0, precision, parallel={"engine": "deepspeed"}), groups)
    block, low = engine.model.blocks[0], LOW_BIT[precision]
    with torch.no_grad():
        x = block.attention_norm(engine.model.embedding(batch(groups).tokens.flatten()))
        weights = list(block.attention.qkv.parameters())
        y, exact = torch.cat(low.forward(low.operand(x), weights), 1), x.double() @ torch.cat(weights).double().t()
    found = step(engine)
    ours = [found[f"quant/0/qkv.{name}"] for name in ("Y/rel_l2", "Y/cosine")]
    return list(zip(ours, [rel_l2(y, exact), cosine(y, exact)], strict=True))


def test_a_layer_is_compared_with_float64_on_its_own_input() -> None:
    for precision, pairs in zip(LOW_BIT, run_distributed(by_hand, 1)[0], strict=True):
        for ours, truth in pairs:
            assert ours == pytest.approx(truth, rel=1e-3, abs=1e-6), precision


def of_a_mixture(stage: int, ranks: int) -> list[list[dict[str, float]]]:
    """Return the numbers of two steps of a mixture in INT8, with measurement and without. Ranks have experts between
    them."""
    experts = {"number": 4, "per_token": 2, "ffn_size": 48, "dense_layers": 1}
    cfg = config(stage, "int8", model={"experts": experts}, parallel={"expert_parallel_size": ranks})
    engines = (tiny.engine(cfg, tiny.join(1, ep_size=ranks)) for _ in range(2))
    return [[step(engine, watched) for _ in range(2)] for engine, watched in zip(engines, (True, False), strict=True)]


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 2)])
def test_experts_are_measured_and_their_steps_stay(stage: int, ranks: int) -> None:
    watched, alone = run_distributed(of_a_mixture, ranks, stage, ranks)[0]
    found = measured(watched[0])
    layers = [f"0/{name}" for name in LAYERS] + ["1/qkv", "1/out", "1/experts_gate_up", "1/experts_down", "head/head"]
    names = {f"quant/{layer}.{number}" for layer in layers for number in NUMBERS}
    assert set(found) == names - {"quant/head/head.dY/zero_share_dW"}  # In INT8 its dW is in 16 bits.
    assert [{name: one[name] for name in other} for one, other in zip(watched, alone, strict=True)] == alone
    for name, value in found.items():
        if name.startswith("quant/head/head.d"):  # In INT8 its gradients are in 16 bits.
            continue
        low, high = {"rel_l2": (0.003, 0.06), "cosine": (0.998, 1)}.get(name.rpartition("/")[2], (0, 0.3))
        assert low <= value < high, (name, value)


@pytest.mark.parametrize("precision", GROUPED_LOW_BIT)
@pytest.mark.parametrize("gathers", [True, False])
def test_experts_are_compared_with_float64(monkeypatch, precision, gathers) -> None:
    """Sampled rows have nearly the error of all of them. An expert has no rows, and rows are left over."""
    loads, sizes = (37, 0, 90, 1), (64, 48)
    choices, low, draw = random_choices(loads, 2), GROUPED_LOW_BIT[precision], torch.Generator().manual_seed(0)
    rows = plan_rows(choices, 4, 150)
    x = torch.randn(len(choices) if gathers else 150, sizes[0], generator=draw)
    weight = torch.randn(4, sizes[1], sizes[0], generator=draw)
    grad = torch.randn(150, sizes[1], generator=draw).exp() * (rows.choice >= 0)[:, None]
    x = x if gathers else x * (rows.choice >= 0)[:, None]
    told: dict[str, Any] = {}
    layer = SimpleNamespace(weights=(weight, weight))
    tell = lambda name, how, *sums: told.__setitem__(name.rpartition(".")[2], float(how(*sums)))  # noqa: E731

    def results(matmul: GroupedMatmul) -> list[torch.Tensor]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = grouped_matmul(*leaves, rows, matmul, gathers=gathers)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    observed = ObservedExperts(low=low, tell=tell, tag="quant/0/experts", layer=layer)
    made, usual = results(observed), results(low)
    assert all(map(torch.equal, made, usual))
    wide = GATHER_ROWS(x, rows.choice, 2) if gathers else x
    exact = grouped_product_twin(wide.double(), weight.double().mT, rows.ends)
    assert told["Y/rel_l2"] == pytest.approx(rel_l2(made[0], exact), rel=1e-3)
    exact = grouped_weight_product_twin(grad.double(), wide.double(), rows.ends)
    assert told["dW/rel_l2"] == pytest.approx(rel_l2(made[2], exact), rel=1e-3)
    of_x = grouped_product_twin(grad.double(), weight.double(), rows.ends)
    of_low = low.input_gradient(low.prepare(grad, rows, False), weight, rows, ())
    assert told["dX/rel_l2"] == pytest.approx(rel_l2(of_low, of_x), rel=1e-3)
    zero = low.prepare(grad, rows, False)[0].float() == 0
    assert told["dY/zero_share_dX"] == pytest.approx(float((zero & (grad != 0)).sum() / (grad != 0).sum()))
    every = dict(told)
    monkeypatch.setattr(linear_errors, "SAMPLE", 1500)
    results(observed)
    assert told != every and {name: pytest.approx(value, rel=0.3, abs=0.01) for name, value in every.items()} == told


def test_only_chosen_blocks_in_8_bits_are_measured(monkeypatch) -> None:
    """Every measured block is run twice, forward and recomputed, however training keeps its activations. Nothing else
    is added."""
    walks, walk = [], Block._walk
    monkeypatch.setattr(Block, "_walk", lambda block, *given: walks.append(block) or walk(block, *given))

    def passing(model: Transformer) -> torch.Tensor:
        groups.metrics.sum("of the model", 1.0)
        return model(**batch(groups).inputs(torch.device("cpu")))

    def found(cfg: RunConfig) -> dict[str, float]:
        model = tiny.model(cfg, groups)
        groups.metrics.clear()
        groups.metrics.sum("before", 1.0)
        LinearErrors(model, [1]).measure([partial(gradients, partial(passing, model))])
        assert all(parameter.grad is None for parameter in model.parameters())
        return groups.metrics.reduce(torch.device("cpu"))

    groups = ParallelGroups.single()
    large = {f"quant/1/{name}.{number}" for name in ("qkv", "gate_up") for number in NUMBERS}
    for checkpointing in ("none", "selective", "full"):
        sections = {"model": SHAPE, "training": {"activation_checkpointing": checkpointing}}
        some = tiny.config(0, linear={"precision": "fp8", "keep_layers_below": 64 * 96 + 1}, **sections)
        assert set(found(some)) == {"before", *large}
        assert len(walks) == 4
        walks.clear()
    assert found(tiny.config(0, model=SHAPE)) == {"before": 1.0} and not walks


# -- gradients that vanish -----------------------------------------------------------------------------------------


def test_a_layer_whose_gradients_vanish_is_named_once() -> None:
    controller = Vanishing()

    def after(**shares: float) -> list[str]:
        metrics = {f"quant/{name.replace('_', '/')}.dY/zero_share_dX": share for name, share in shares.items()}
        metrics["quant/0/dS/zero_share_dQ"] = 0.9  # This metric belongs to attention.
        return [event.text for event in controller.after_step(Taken(100, 1000, 10, metrics))]

    assert after(**{"0_down": MUCH, "0_out": 0.0}) == []
    (said,) = after(**{"0_down": 0.2, "1_out": 0.613})
    assert said.startswith(
        "gradients vanish in 8 bits: of the output's gradient 61.3% of the entries of linear layer 1/out,"
    )
    assert "more than 10% of 1 other; " in said and "linear.keep_first_blocks" in said
    assert after(**{"0_down": 0.9, "1_out": 0.9}) == []
    again = Vanishing()
    again.restore(json.loads(json.dumps(controller.state())))
    controller = again
    assert after(**{"0_down": 0.9}) == [] and "layer 1/down;" in after(**{"0_down": 0.9, "1_down": 0.2})[0]


def train(corpus: str, run_dir: str, stage: int, precision: str, every: int | str) -> None:
    how = {"linear": {"precision": precision}, "stability": {"monitor": {"every_steps": every, "layers": [-1]}}}
    linear_errors.MUCH = -1.0  # Every layer is above this limit.
    controllers.MICRO_BATCHES, monitor.EVERY_STEPS = 6, 2
    make_trainer(corpus, run_dir, 4, stage, model=SHAPE, data={"micro_batch_size": 2}, **how).train()


@pytest.mark.parametrize(
    ("stage", "precision", "every", "steps"), [(1, "fp8", 2, [2, 4]), (2, "int8", "auto", [3]), (1, "bf16", "auto", [])]
)
def test_a_run_writes_what_it_measured_and_what_vanishes(
    stage: int, precision: str, every: int | str, steps: list[int], corpus: Path, tmp_path: Path, capfd
) -> None:
    """The run has 16-bit attention. A step has two micro-batches: by auto, six of them, three steps, lie between two
    measurements."""
    run_distributed(train, 1, str(corpus), str(tmp_path / "run"), stage, precision, every)
    assert [row["step"] for row in rows_of(tmp_path / "run") if "quant/1/down.dW/rel_l2" in row] == steps
    told = json.loads((tmp_path / "run/stability.json").read_text())
    names = {f"quant/1/{name}.{number}" for name in LAYERS for number in NUMBERS} if steps else set()
    assert {name for name in told["metrics"] if name.startswith("quant/")} == names
    assert {kind: event["count"] for kind, event in told["events"].items()} == ({"vanishing": 1} if steps else {})


def train_to_16_bits(corpus: str, run_dir: str) -> None:
    linear = {"precision": "fp8", "keep_last_fraction": 0.5}
    make_trainer(corpus, run_dir, 4, model=SHAPE, linear=linear, stability={"monitor": {"every_steps": 2}}).train()


def test_a_run_that_moved_to_16_bits_reports_no_loss_in_8(corpus: Path, tmp_path: Path, capfd) -> None:
    """The run goes on from the last checkpoint but one, which lies after the move."""
    said = []
    for _ in range(2):
        run_distributed(train_to_16_bits, 1, str(corpus), str(tmp_path / "run"))
        said.append(capfd.readouterr().out)
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    first, second = said
    assert "16 bits since" in second and "16 bits since" not in first
    assert "quant/1/down.dW/rel_l2" in (tmp_path / "run/metrics.jsonl").read_text()
    nothing = "or multiplies in 8 bits: nothing is measured"
    assert nothing not in first and nothing in second


# -- what is said before a run -------------------------------------------------------------------------------------


def test_a_monitor_has_an_effect_with_linear_layers_in_8_bits() -> None:
    neither = "linear layers neither"
    for precision, why in {"fp8": "", "int8": "", "auto": neither, "bf16": neither}.items():
        monitor = {"stability": {"monitor": {"every_steps": 10}}}
        cfg = tiny.config(1, model=SHAPE, linear={"precision": precision}, **monitor)
        found = [f for f in check(cfg, 1, files=False) if f.key.startswith("stability.monitor")]
        assert [f.rule for f in found] == ["monitor_of_nothing"] * bool(why)
        assert all(why in f.message for f in found)
    cfg = tiny.config(1, model=SHAPE, training={"dtype": "bf16"}, **monitor)  # auto may choose here.
    assert not [f for f in check(cfg, 1, files=False) if f.rule == "monitor_of_nothing"]


def test_memory_counts_the_pass_of_the_monitor() -> None:
    """The pass is not compiled. Where blocks are recomputed anyway it holds more than training: fp32 copies, and inputs
    in 16 bits."""

    def largest(precision: str, every: str | None) -> dict[str, int]:
        how = {"dtype": "bf16", "activation_checkpointing": "full", "compile": "on"}
        sections = {"linear": {"precision": precision}, "stability": {"monitor": {"every_steps": every}}}
        size = {"hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16, "head_dim": 128}
        data = {"seq_length": 4096, "micro_batch_size": 2}
        cfg = tiny.config(1, "bf16", model=size, data=data, tokens_per_step={"tokens": 8192}, **sections)
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update=how)})
        return {item.name: item.bytes for item in memory_per_rank(cfg, 1, 128)}

    without, watched = largest("fp8", None), largest("fp8", "auto")
    assert watched["monitor"] == 4 * 8192 * 5632 and "monitor" not in without  # This is the input of `down`.
    assert sum(watched.values()) > sum(without.values())
    assert largest("bf16", "auto") == largest("bf16", None)
