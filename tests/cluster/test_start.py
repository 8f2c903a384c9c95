"""The start of a run on many ranks, measured by the benchmark's simulation."""

import importlib.util
import os
import resource
import sys
from pathlib import Path

from distributed import run_distributed
from sagetrain.config.load import load_config

SPEC = importlib.util.spec_from_file_location("benchmark_start", Path(__file__).parents[2] / "benchmarks/start.py")


def simulate(*sizes: tuple[int, int, int]) -> list[dict[str, float]]:
    """Simulate a start on each (world size, tensor-parallel size, context-parallel size)."""
    # dataclasses look their module up in sys.modules.
    benchmark = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(benchmark)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Rank 0 raises this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    cfg = load_config("7b", ["model.num_layers=2", "parallel.zero_stage=3"])
    return [benchmark.simulate(*size, cfg) for size in sizes]


def test_the_work_of_a_rank_at_the_start_does_not_grow(monkeypatch) -> None:
    """Store requests and process groups of all ranks together grow in proportion to the ranks."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # Older versions of torch end each new_group with a barrier.
    ((*plain, layered),) = run_distributed(simulate, 1, (8, 1, 1), (16, 1, 1), (32, 1, 1), (8, 2, 2))
    assert [run["groups"] for run in plain] == [2 * 8, 2 * 16, 2 * 32]
    assert layered["groups"] == 3 * 8
    of_8, of_16, of_32 = (run["requests"] for run in plain)
    # Rank 0 makes some 8 requests at any number of ranks, so the test compares additions of ranks. Waiting ranks ask
    # again after a time, which makes a twentieth more on a busy machine. If each rank asked once for every other one,
    # the ratio would be 2.8 instead of 2.
    assert of_32 - of_16 < 1.1 * 2 * (of_16 - of_8)
    assert max(of_8 / 8, of_16 / 16, of_32 / 32) < 40
    assert layered["requests"] / 8 < 45
    for run in (*plain, layered):
        assert 0 < run["met"] <= run["checked in"] <= run["groups made"] <= run["saver ready"] < run["ledger verified"]
