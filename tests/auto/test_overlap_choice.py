"""parallel.tensor_parallel_overlap `auto` is timed when a run begins, and kept in the layout in which it was timed."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from sagetrain.auto import overlap_choice, timed_choice
from sagetrain.auto.kept import Kept
from sagetrain.auto.overlap_choice import record, settle_overlap, time_overlap
from sagetrain.config import RunConfig
from sagetrain.costs import accounting
from sagetrain.data.batch import Batch
from sagetrain.model.compile import compile_blocks

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def config(overlap: str = "auto", tensor: int = 2, **data: int) -> RunConfig:
    parallel = {"tensor_parallel_size": tensor, "tensor_parallel_overlap": overlap, "sequence_parallel": True}
    return tiny.config(1, "bf16", parallel=parallel, data={"micro_batch_size": 2, **data})


@pytest.mark.parametrize(("cfg", "continues", "device", "expected", "timed"), [
    (config(), False, GPU, "off", True),
    (config(), False, "GPU, little work", "off", False),
    (config("on"), False, GPU, "on", False),
    (config(tensor=1), False, GPU, "off", False),
    # An odd number of tokens has no halves.
    (config(micro_batch_size=1, seq_length=tiny.SEQ - 1), False, GPU, "off", False),
    (config(), False, CPU, "on", False),
    (config(), True, GPU, "on", False),
    (config("off"), True, GPU, "off", False),
    (config(tensor=4), True, GPU, "off", True),
    (config(micro_batch_size=4), True, GPU, "off", True),
])  # fmt: skip
def test_auto_is_timed_once_and_kept_in_its_layout(cfg, continues, device, expected, timed, tmp_path) -> None:
    device, work = (GPU, False) if isinstance(device, str) else (device, True)
    calls, said = list[int](), list[str]()
    before = Kept.of(tiny.run_state(overlap=record(config("on"))), {}) if continues else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_choice, "time_overlap", lambda *_, **__: calls.append(1) or {"off": 1.0, "on": 1.0})
        patch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
        patch.setattr(accounting, "_OVERLAP_FLOPS", 0 if work else math.inf)
        patch.setattr(timed_choice, "of_rank_0", lambda found, device: found)
        for number in range(2):  # The second run is another one of this host.
            patch.setenv("SAGETRAIN_CACHE", str(tmp_path))
            start = tiny.start(cfg, tmp_path / f"run {number}", said.append, device=device)
            chosen, why = settle_overlap(start, before, [], dict)
    assert (chosen, len(calls), len(said)) == (expected, int(timed), 3 * timed)
    assert why.startswith("as the run had it") == (continues and not timed and cfg != config("off"))


def times_of_a_rank(num_layers: int) -> tuple[list, dict[str, float]]:
    """Return the timed calls, and the times that this rank was told."""
    groups, timed, right = tiny.join(2), [], overlap_choice._seconds
    cfg = config()
    draw = torch.randint(0, tiny.VOCAB, (2, tiny.SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(draw[:, :-1], draw[:, 1:].clone(), None, None, None, [])
    batch.labels[0, :3] = -100  # These tokens do not count in the loss.

    def seconds(model, blocks, inputs, count, device) -> float:
        spent = right(model, blocks, inputs, 1, device)
        timed.append((model.overlap, blocks, len(model.blocks), spent > 0))
        return 100 + blocks * ((2.0 if model.overlap else 1.0) + dist.get_rank())

    overlap_choice._seconds, overlap_choice._WINDOWS = seconds, 2
    overlap_choice._ROWS_A_RANK = 64  # The real number makes the head many times as large as the blocks here.
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"num_layers": num_layers})})
    return timed, time_overlap(tiny.start(cfg, groups=groups), [{}] * num_layers, batch.inputs(CPU))


def test_both_ways_are_timed_on_all_ranks_the_slowest_counts() -> None:
    for timed, seconds in run_distributed(times_of_a_rank, 2, overlap_choice.MANY + 3):
        many = overlap_choice.MANY
        assert {*timed} == {(on, size, many, True) for on in (False, True) for size in (overlap_choice.FEW, many)}
        assert seconds == {"off": 2.0, "on": 3.0}
    for timed, seconds in run_distributed(times_of_a_rank, 2, 4):
        assert {*timed} == {(on, 4, 4, True) for on in (False, True)}
        assert seconds == {"off": 27.0, "on": 28.0}


def graphs_of_a_rank() -> list[list[tuple[str, list[str]]]]:
    """Return the graphs that the first rank makes for the choice, and then by a model that computes whole and one that
    computes in halves: each the code of its operators, and the sizes of its inputs."""
    groups, cfg, made = tiny.join(2), config(), list[tuple[str, list[str]]]()

    def note(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        operators = [f"{node.target}" for node in graph.graph.nodes if node.op.startswith("call")]
        made.append(
            (" ".join(operators), [f"{list(x.shape)}" if isinstance(x, torch.Tensor) else f"{x}" for x in inputs])
        )
        return graph.forward

    first = groups.rank == 0  # The other one calls the same collectives from Python.
    how, found = {"sequence_parallel": True, "activation_checkpointing": "none"}, []
    overlap_choice.compile_blocks = compiled = partial(compile_blocks, backend=note)
    overlap_choice._WINDOWS, overlap_choice._MICRO_STEPS = 1, 1
    batch = {
        "tokens": torch.zeros(2, tiny.SEQ, dtype=torch.int64),
        "labels": torch.zeros(2, tiny.SEQ, dtype=torch.int64),
    }
    time_overlap(tiny.start(cfg, groups=groups, compiled=first), [{}] * 2, batch)
    found.append(made.copy())
    for overlap in (False, True):
        made.clear()
        torch._dynamo.reset() if overlap else None  # A run has one of the two.
        model = tiny.model(cfg, groups, partition=None, overlap=overlap, **how)
        if first:
            compiled(model)
        model.head.compiled = False
        model(**batch).backward()
        found.append(made.copy())
    return found


def test_the_choice_makes_the_graphs_that_the_run_needs() -> None:
    """Two graphs are compiled for the choice, of the sizes that they are timed with. The run's graph of the chosen way
    is then the same, which inductor's cache knows."""
    (choice, *runs), _ = run_distributed(graphs_of_a_rank, 2)
    assert len(choice) == 2
    for timed, run in zip(choice, runs, strict=True):
        assert timed in run
        assert not any("s" in size for size in timed[1])
