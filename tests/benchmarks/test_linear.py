"""The benchmark of linear layers, without a GPU: its sizes, its check, its table."""

import importlib.util
from pathlib import Path

import pytest
import torch

from sagekernels.casts import Rounded, quantize

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_linear", ROOT / "benchmarks/linear.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def test_every_way_passes_the_check_and_what_is_wrong_does_not() -> None:
    sizes, device = {"a": 64, "b": 32}, torch.device("cpu")
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(48, 128, generator=draw).bfloat16()
    grads = [torch.randn(48, size, generator=draw).bfloat16() for size in sizes.values()]
    ways = benchmark.ways_of(128, sizes, device)
    assert list(ways) == ["bf16", *(" ".join(name) for name in benchmark.RECIPES)]
    for name, layer in ways.items():
        benchmark.check(name, layer, x, grads)
        assert all(p.grad is None for p in layer.parameters())
        with pytest.raises(SystemExit, match=f"{name}: the output is wrong by nan"):
            benchmark.check(name, layer, torch.full_like(x, torch.nan), grads)
    stale = ways["fp8 rowwise"]
    with torch.no_grad():
        stale.a.neg_()
    with pytest.raises(SystemExit, match="fp8 rowwise: the output is wrong"):
        benchmark.check("fp8 rowwise", stale, x, grads)


def test_products_that_are_wrong_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = benchmark.product_ways(40, 32, 64, torch.device("cpu"))
    assert list(ways) == list(benchmark.PRODUCT_LIMITS) and all(way().shape == (40, 32) for way in ways.values())

    def larger(x: torch.Tensor, number: torch.dtype, per_row: bool) -> Rounded:
        codes, scale = quantize(x, number, per_row)
        return Rounded(codes, 1.1 * scale)

    monkeypatch.setattr(benchmark, "quantize", larger)
    with pytest.raises(SystemExit, match=r"fp8: the product is wrong by 0\.21"):
        benchmark.product_ways(40, 32, 64, torch.device("cpu"))


def test_the_table_compares_speeds() -> None:
    text = benchmark.table({"up": {"bf16": 2.0, "fp8": 1.0}, "down": {"bf16": 1.0, "fp8": 1.0}})
    assert [line.split() for line in text.splitlines()] == [
        ["layer", "bf16,", "ms", "fp8"],
        ["up", "2.000", "2.00"],
        ["down", "1.000", "1.00"],
        ["block", "3.000", "1.50"],
    ]


@pytest.mark.parametrize(("config", "said"), [("foo", "foo"), ("configs/1b.yaml", "it times a GPU, and there is none")])
def test_what_cannot_be_timed_is_one_line(config: str, said: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["linear.py", "--config", config])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert said in capsys.readouterr().err.splitlines()[-1]
