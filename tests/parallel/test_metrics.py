"""Any rank may add metrics anywhere in a step. They are reduced in the step's one collective."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from runs import rows_of
from sagetrain.data.batch import Batch
from sagetrain.model.mlp import MLP
from sagetrain.parallel.metrics import Metrics
from trained import make_trainer

CPU = torch.device("cpu")


def test_one_process_reduces_what_was_added() -> None:
    metrics = Metrics()
    metrics.mean("loss", torch.tensor(2.0), weight=3)
    metrics.mean("loss", torch.tensor([6.0], requires_grad=True))
    metrics.mean("nothing", 5.0, weight=0)
    for value in (1, 2.5):
        metrics.sum("count", value)
        metrics.max("most", -value)
        metrics.min("least", -value)
        metrics.derive("rms", lambda squares, count: math.sqrt(squares / count), torch.tensor(value**2), 1)
    found = metrics.reduce(CPU)
    assert math.isnan(found.pop("nothing"))
    assert found == {"loss": 3.0, "count": 3.5, "most": -1.0, "least": -2.5, "rms": math.sqrt(7.25 / 2)}
    assert list(found) == sorted(found)
    assert metrics.reduce(CPU) == {}
    metrics.sum("count", 1)
    metrics.clear()
    assert metrics.reduce(CPU) == {}


def cosine(product: float, square: float, other: float) -> float:
    """Return the cosine of vectors that lie on several ranks. It is not the mean of the ranks' cosines."""
    return product / math.sqrt(square * other)


def of_four_ranks() -> dict[str, float]:
    """Reduce metrics with tensor parallel 2 and data parallel 2. Odd ranks add in another order."""
    groups, rank = tiny.join(2), dist.get_rank()
    metrics = groups.metrics
    add = [
        lambda: metrics.mean("mean", torch.tensor(float(rank))),
        lambda: metrics.mean("weighted", rank, weight=rank),
        lambda: metrics.sum("over all", torch.tensor(2**rank)),
        lambda: metrics.sum("over tp", 10.0 + groups.tp_rank, copies=groups.num_replicas),
        lambda: metrics.max("largest", torch.tensor(-float(rank))),
        lambda: metrics.max("largest number", rank * 1.5),
        lambda: metrics.min("least", torch.tensor(1.0 + rank)),
        lambda: metrics.derive(
            "cosine", cosine, *(torch.tensor(x) for x in ((0.0, 1.0, 0.0), (3.0, 1.0, 9.0))[rank % 2])
        ),
    ]
    add += [lambda: metrics.vector("vector", torch.arange(70) * 10.0**rank), lambda: metrics.vector("a", torch.ones(1))]
    for each in reversed(add) if rank % 2 else add:
        each()
    found = metrics.reduce(CPU)
    assert metrics.vectors["vector"].equal(torch.arange(70, dtype=torch.float64) * 1111)
    assert metrics.vectors["a"].tolist() == [4]
    return found


def test_mean_sum_and_maximum_over_ranks_and_groups() -> None:
    expected = {
        "cosine": 6 / math.sqrt(4 * 18), "largest": 0.0, "largest number": 4.5, "least": 1.0, "mean": 1.5,
        "over all": 15.0, "over tp": 21.0, "weighted": 14 / 6,
    }  # fmt: skip
    assert run_distributed(of_four_ranks, 4) == [expected] * 4


def other_names(names: list[list[str]]) -> str:
    metrics = Metrics()
    for name in names[dist.get_rank()]:
        metrics.sum(name, 1.0)
    metrics.max("largest", 1.0)
    try:
        metrics.reduce(CPU)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("names", [[["a"], ["b"]], [["a", "b"], ["a"]]])
def test_ranks_that_add_different_names_are_told(names) -> None:
    for said in run_distributed(other_names, 2, names):
        assert said.startswith("metrics: the ranks differ in what they have added")


def engine_with_a_monitor(stage: int, with_maximum: bool) -> tuple[list[dict], int, float]:
    """Return three results of an engine. First come the metrics of two steps with an evaluation between them, which
    one-line additions in a layer's forward and backward make. Then comes the number of reductions over the world in the
    second step. Last comes the first loss of an engine without the additions."""
    groups = tiny.join(1)
    plain = tiny.global_step(tiny.engine(tiny.config(stage), groups), 0, sequences=8).loss
    engine = tiny.engine(tiny.config(stage), groups)
    metrics, world_reductions, all_reduce = groups.metrics, [], dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.dtype == torch.float64 and tensor.numel() > 1:  # DeepSpeed's own reductions are of scalars.
            world_reductions.append(op)
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    dist.all_reduce = counted

    def watch(_module, _arguments, output):
        metrics.mean("activations/rms", output.square().mean().sqrt())
        metrics.sum("activations/calls", 1, copies=groups.num_replicas)
        if output.requires_grad:
            output.register_hook(lambda grad: metrics.mean("gradients/rms", grad.square().mean().sqrt()))
        if with_maximum:
            metrics.max("activations/largest", output.abs().max())

    engine.model.blocks[1].mlp.register_forward_hook(watch)
    batch = Batch(*torch.ones(2, 1, tiny.SEQ, dtype=torch.long), None, None, None, [])
    found = []
    for step in range(2):
        world_reductions.clear()
        found.append(tiny.global_step(engine, step, sequences=8).metrics)
        reductions = len(world_reductions)
        engine.evaluate([batch])
    return found, reductions, plain


@pytest.mark.parametrize(("stage", "with_maximum"), [(1, False), (3, True)])
def test_a_layer_adds_metrics_and_the_engine_knows_nothing(stage, with_maximum) -> None:
    first, second = run_distributed(engine_with_a_monitor, 2, stage, with_maximum)
    assert first == second
    steps, reductions, plain = first
    assert steps[0]["train/loss"] == plain  # Watching changes nothing.
    assert reductions == 1 + with_maximum
    for metrics in steps:
        # A rank has four micro-batches. Those of the evaluation belong to no step.
        assert metrics["activations/calls"] == 4
        assert metrics["activations/rms"] > 0 and metrics["gradients/rms"] > 0
        assert ("activations/largest" in metrics) == with_maximum
        assert {"train/loss", "train/grad_norm"} < metrics.keys() and not {"stop", "folds", "span"} & metrics.keys()
    assert steps[0]["activations/rms"] != steps[1]["activations/rms"]


def compiled_addition() -> float:
    metrics = Metrics()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor) -> torch.Tensor:
        metrics.mean("activations/mean", x.mean())
        return 2 * x

    for _ in range(3):
        layer(torch.ones(4, requires_grad=True)).sum().backward()
    return metrics.reduce(CPU)["activations/mean"]


def test_a_compiled_layer_can_add() -> None:
    assert compiled_addition() == 1.0


def train_with_one_more_line(corpus: str, run_dir: str) -> None:
    forward = MLP.forward

    def watched(self, x):
        y = forward(self, x)
        self.gate_up.region.groups.metrics.max("activations/mlp", y.abs().max())  # This is the one line.
        return y

    MLP.forward = watched
    make_trainer(corpus, run_dir, 3, data={"micro_batch_size": 2}).train()


def test_a_new_metric_is_one_line_where_it_is_made(corpus: Path, tmp_path: Path) -> None:
    run_distributed(train_with_one_more_line, 2, str(corpus), str(tmp_path / "run"))
    steps = [row for row in rows_of(tmp_path / "run") if "train/loss" in row]
    assert len(steps) == 3 and all(row["activations/mlp"] > 0 for row in steps)
