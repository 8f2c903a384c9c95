"""The kernel benchmark counts right and never times a function whose result is wrong."""

import pytest
import torch

from sagekernels import attention_reference, bench
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
