"""The start of a run on many ranks, by the benchmark's simulation of it."""

import importlib.util
import os
import resource
import sys
from pathlib import Path

from distributed import run_distributed
from sagetrain.config.load import load_config

SPEC = importlib.util.spec_from_file_location("benchmark_start", Path(__file__).parents[2] / "benchmarks/start.py")


def simulate(*sizes: tuple[int, int, int]) -> list[dict[str, float]]:
    """A start on each (world size, tensor-parallel size, context-parallel size)."""
    benchmark = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)  # dataclasses look for their module
    SPEC.loader.exec_module(benchmark)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))  # rank 0 raises it
    cfg = load_config("7b", ["model.num_layers=2", "parallel.zero_stage=3"])
    return [benchmark.simulate(*size, cfg) for size in sizes]


def test_what_a_rank_does_at_the_start_does_not_grow_with_the_ranks(monkeypatch) -> None:
    """Store requests and process groups: those of all ranks grow in proportion to the ranks."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # as older versions of torch end each new_group
    ((*plain, layered),) = run_distributed(simulate, 1, (8, 1, 1), (16, 1, 1), (32, 1, 1), (8, 2, 2))
    assert [run["groups"] for run in plain] == [2 * 8, 2 * 16, 2 * 32]
    assert layered["groups"] == 3 * 8
    of_8, of_16, of_32 = (run["requests"] for run in plain)
    # Rank 0 makes some 8 requests whatever the ranks, so 16 more ranks are looked at. Ranks that wait ask by the clock,
    # a twentieth more on a busy machine. If each rank asked once for every other one, the ratio would be 2.8, not 2.
    assert of_32 - of_16 < 1.1 * 2 * (of_16 - of_8)
    assert max(of_8 / 8, of_16 / 16, of_32 / 32) < 40
    assert layered["requests"] / 8 < 45
    for run in (*plain, layered):
        assert 0 < run["met"] <= run["checked in"] <= run["groups made"] <= run["saver ready"] < run["ledger verified"]
