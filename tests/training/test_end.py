"""No recording is left when a run ends, so that its process group can end: NCCL waits for recordings that use it."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from fake_graph import FakeGraph
from runs import write_config
from sagekernels.graphs import Pool
from sagetrain import api
from sagetrain.cluster.join import end_distributed
from sagetrain.engines import recorder

STEPS = 6


class Graph:
    """A CUDA graph of a CPU. The latest graph holds what runs in a capture."""

    made: "weakref.WeakSet[Graph]" = weakref.WeakSet()

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        Graph.made.add(self)
        self.launches: FakeGraph | None = None

    def capture_end(self) -> None:
        self.launches = self.launches or FakeGraph()

    def replay(self) -> None:
        assert self.launches
        self.launches.replay()

    def reset(self) -> None:
        self.launches = None


def alive() -> list[Graph]:
    """Return the graphs that NCCL would wait for."""
    return [graph for graph in Graph.made if graph.launches]


def record_on_cpu() -> None:
    """Let engines record on CPUs, in pools of their own."""
    torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle = Graph, int  # type: ignore[misc, assignment]

    def record_of(pool: Pool) -> Callable[[Callable[[], None]], Any]:
        def record(function: Callable[[], None]) -> Any:
            made: list[FakeGraph] = []
            graph: Any = pool.record(lambda: made.append(FakeGraph.of(function)))
            graph.launches = made[0]
            return graph

        return record

    recorder.recorder = lambda device: record_of(Pool())  # type: ignore[assignment]


class Ends(api.Callback):
    """End a run in its last step but one, by an error or as a signal does."""

    def __init__(self, how: str) -> None:
        self.how, self.seen = how, 0
        self.error: Exception | None = None

    def on_start(self, start: api.RunStart) -> None:
        self.stop, self.model = start.stop, weakref.ref(start.engine.model)

    def on_step(self, position: api.Position, result: Any) -> None:
        self.seen = len(alive())
        if self.how == "error" and position.step == STEPS - 1:
            raise ValueError("it ends here")
        if self.how == "signal" and position.step == STEPS - 1:
            self.stop()


def left_by_runs(paths: dict[str, Path]) -> dict[str, tuple[int, str, int, bool]]:
    """Return how many recordings each run had, how it ended, how many are left while its error is known, and whether
    its model is left."""
    record_on_cpu()
    os.environ["MASTER_PORT"] = "29500"  # The ranks have met. This is only read.
    found = {}
    for name, path in paths.items():
        ends = Ends(name.split()[-1])
        try:
            said = str(api.train(path, callbacks=[ends]).finished)
        except api.TrainingError as error:
            said, ends.error = "error", error  # The traceback has the engine.
        found[name] = ends.seen, said, len(alive()), ends.model() is not None
    return found


def test_a_run_leaves_no_recordings(tmp_path: Path, corpus: Path) -> None:
    """Neither its end, nor an error whose traceback is kept, nor a signal leaves any, of replicas or of stages.
    The error alone leaves the model."""
    paths, ends = {}, {"end": "True", "error": "error", "signal": "False"}
    for layout, sections in {"ZeRO 3": {"zero_stage": 3}, "stages": {"pipeline_parallel_size": 2}}.items():
        for how in ends:
            name = f"{layout}, {how}"
            paths[name] = write_config(
                tmp_path / f"{name}.yaml", corpus, tmp_path / name, attention={"backend": "sdpa"}, parallel=sections,
                tokens_per_step={"stages": [{"from_tokens": 0, "tokens": 256}]}, data={"micro_batch_size": 1},
                training={"total_tokens": 256 * STEPS, "cuda_graphs": "on"},
            )  # fmt: skip
    for found in run_distributed(left_by_runs, 2, paths):
        for name, (seen, said, left, model) in found.items():
            assert (seen > 0, said, left, model) == (True, ends[name.split()[-1]], 0, said == "error"), found


def test_a_group_ends_behind_all_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that an error has ended is gone too, though the error's traceback has it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", int)
    pool, left = Pool(), []
    recording = pool.record(int)
    with pytest.raises(ValueError, match="within") as error:
        pool.record(lambda: int("within"))
    assert alive() == [recording] and error.tb
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(len(alive())))
    end_distributed()
    assert left == [0]
