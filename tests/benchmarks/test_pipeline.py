"""The benchmark of pipelines checks, times and compares on a machine without GPUs too."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys

from distributed import run_distributed
from runs import ROOT


def printed(arguments: list[str]) -> str:
    spec = importlib.util.spec_from_file_location("pipeline_benchmark", ROOT / "benchmarks/pipeline.py")
    sys.modules[spec.name] = benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        benchmark.main(arguments)
    return output.getvalue()


def test_a_pipeline_is_timed_beside_a_part_of_it() -> None:
    said, other = run_distributed(printed, 2, ["--tiny", "--first", "2"])
    assert said.startswith("losses and norms are those of ZeRO 1\n") and not other
    for line in ("one GPU with the blocks of a stage ", "pipeline 2 ", "    idle "):
        assert f"\n{line}" in said, said
