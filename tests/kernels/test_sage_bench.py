"""The kernel benchmark and the report count right and never time a function whose result is wrong."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sagekernels import attention_reference, bench, launch, report
from sagekernels.admission import LIMITS
from sagekernels.testing import Shape


def exact(q, k, v, cu_seqlens):
    return attention_reference(q, k, v, causal=True, cu_seqlens=cu_seqlens)


def forgets_a_gradient(q, k, v, cu_seqlens):
    return exact(q, k, v.detach(), cu_seqlens) + 0 * v.sum()


def refuses(q, k, v, cu_seqlens):
    raise NotImplementedError("takes no packed documents")


@pytest.mark.parametrize("documents", [(), (30, 34)])
def test_only_right_results_are_timed(documents) -> None:
    timed = []

    def timer(attend):
        timed.append(attend)
        return bench.Times(1.0, 4.0) if attend is exact else bench.Times(0.5, 2.0)

    functions = {
        "ours": (exact, LIMITS["fine"], True),
        "wrong": (forgets_a_gradient, LIMITS["fine"], False),
        "unable": (refuses, LIMITS["fine"], False),
        "peer": (lambda *x: exact(*x), LIMITS["fine"], False),
    }
    shape = Shape(1, 64, 64, 2, 2, 16, documents=documents)
    rows = bench.measure(shape, functions, timer, dtype=torch.bfloat16, device="cpu")
    assert timed == [exact, functions["peer"][0]]
    assert "x0.50 forward  x0.50 both" in rows[1]
    assert any("wrong" in row and "not timed: dv is zero in some head" in row for row in rows)
    assert any("unable" in row and "takes no packed documents" in row for row in rows)


def test_operations_and_shapes() -> None:
    assert bench.flops(Shape(2, 100, 100, 4, 4, 64, causal=False)) == 4 * 2 * 4 * 100 * 100 * 64
    assert bench.flops(Shape(1, 30, 30, 1, 1, 64, documents=(10, 20))) == 4 * 64 * (100 + 400) / 2
    windowed = Shape(2, 100, 100, 1, 1, 64, window=30)
    pairs = sum(min(i + 1, 30) for i in range(100))
    assert bench.flops(windowed) == pytest.approx(4 * 2 * 64 * pairs, rel=0.01)
    assert len([shape for shape in bench.shapes([2048, 8192], [64], [128, 4096]) if shape.window]) == 3
    for shape in bench.shapes([2048, 65536], [64, 128]):
        assert shape.heads * shape.head_dim == 2048
        assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize(("name", "half"), [("NVIDIA GeForce RTX 3090", True), ("NVIDIA L40S", False)])
def test_cards_that_add_up_in_float16(monkeypatch, name, half):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    launch.half_sums.cache_clear()
    assert launch.half_sums(torch.device("cuda", 0)) == half and not launch.half_sums(torch.device("cpu"))
    launch.half_sums.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("command", "what"), [(bench, "the benchmark"), (report, "the report")])
def test_without_a_gpu_it_says_so(monkeypatch, capsys, command, what):
    monkeypatch.setattr(sys, "argv", [command.__name__])
    with pytest.raises(SystemExit) as done:
        command.main()
    assert done.value.code == 2 and capsys.readouterr().err.startswith(f"{what} needs an NVIDIA GPU")


def test_rates_of_products_are_reported_or_why_not(monkeypatch):
    monkeypatch.setattr(report, "SIDE", 32)
    bf16, int8 = report.product_rates(torch.device("cpu"))
    assert "bf16 product: " in bf16 and int8.endswith(" T/s")

    def refused(*_):
        raise NotImplementedError("compute capability 10.3")

    monkeypatch.setattr(report, "int8_product", refused)
    assert report.product_rates(torch.device("cpu"))[1].endswith("INT8 product: compute capability 10.3")


def test_the_report_is_one_page_with_errors_and_ratios(monkeypatch):
    """The page of the machine's CPU: attention by the twin, and what does not run there is named with the reason."""
    monkeypatch.setattr(report, "SIDE", 32)
    monkeypatch.setattr(report, "time_attention", lambda attend, **_: bench.Times(1.0, 3.0))
    card = SimpleNamespace(name="A card", major=8, minor=9, total_memory=24 << 30)
    lines = list(report.page(torch.device("cpu"), card, [64]))
    assert lines[0] == "A card, compute capability 8.9, 24 GiB"
    errors = [line for line in lines if line.startswith("errors of fine: o 0.0")]
    assert len(errors) == 2 and all(name in line for line in errors for name in ("dq", "dk", "dv"))
    timed = [line.split() for line in lines if " ms " in line]
    assert {"fine", "scores", "(torch)"} <= {row[1] for row in timed}
    assert sum("x1.00 forward  x1.00 both" in line for line in lines) >= 4
    assert any("not timed" in line for line in lines if line.strip().startswith("cuDNN"))
