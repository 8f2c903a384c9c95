"""The benchmark of mixtures of experts, without a GPU: its ways, and that it times nothing that is wrong."""

import importlib.util
from pathlib import Path

import pytest
import torch

from sagekernels.grouped_casts import weight_casts

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_experts", ROOT / "benchmarks/experts.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)
SHAPE, CPU = benchmark.Shape(64, 48, 6, 2), torch.device("cpu")


def test_every_way_passes_the_check_and_what_is_wrong_does_not() -> None:
    mixture, grad = benchmark.random_mixture(SHAPE, 90, CPU)
    truth = benchmark.judge(mixture, grad)
    ways = benchmark.ways_of(mixture)
    assert list(ways) == ["torch", "bf16", *(" ".join(name) for name in benchmark.GROUPED_RECIPES)]
    for name, way in ways.items():
        found = benchmark.results(way, mixture, grad)
        benchmark.check(name, found, truth)
        for which, what in enumerate(("output", "gradient of x", "router", "gate_up", "down")):
            wrong = [1.2 * one if place == which else one for place, one in enumerate(found)]
            with pytest.raises(SystemExit, match=f"{name}: {what} is wrong by 0.2"):
                benchmark.check(name, wrong, truth)
    kept = ways["int8 rowwise"].args[1]
    kept[0][1].mul_(1.2)
    with pytest.raises(SystemExit, match="int8 rowwise: output is wrong"):
        benchmark.check("int8 rowwise", benchmark.results(ways["int8 rowwise"], mixture, grad), truth)


def test_products_that_are_wrong_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = benchmark.product_ways(SHAPE, 90, CPU)
    assert list(ways) == ["bf16", "int8", "fp8"] and all(len(products) == 6 for products in ways.values())

    def larger(weight: torch.Tensor, number: torch.dtype) -> tuple[torch.Tensor, ...]:
        codes, scale, *back = weight_casts(weight, number)
        return codes, 1.1 * scale, *back

    monkeypatch.setattr(benchmark, "weight_casts", larger)
    with pytest.raises(SystemExit, match=r"int8: output is wrong by 0\.1"):
        benchmark.product_ways(SHAPE, 90, CPU)


def test_the_line_names_every_way() -> None:
    assert benchmark.line({"bf16": 2.0, "int8": 1.0}, "bf16") == "bf16 2.000 ms (1.00 x), int8 1.000 ms (2.00 x)"
