"""The product of INT8 codes with their scales, as an operator of torch: eager and compiled."""

import pytest
import torch

from sagekernels.casts import INT8, MULTIPLE, Rounded, quantize
from sagekernels.int8_matmul import INT8_PRODUCT, PIECE, int8_product, product_twin


def factor(seed: int, rows: int, columns: int) -> Rounded:
    return quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), INT8)


def test_the_operator_keeps_its_promises():
    """The operator has its schema, and its empty results for torch.compile, with dims that change too."""
    a, b = factor(1, 37, 32), factor(2, 20, 32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(INT8_PRODUCT, (*a, *b, torch.bfloat16), test_utils=tests)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: int8_product(*x, torch.bfloat16) + 1, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (37, 48, 50):
        a = factor(1, rows, 32)
        assert torch.equal(compiled(*a, *b), int8_product(*a, *b, torch.bfloat16) + 1)


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"a": torch.zeros(4, 32)}, TypeError, "takes int8 to bf16, fp16 or fp32, got torch.float32"),
    ({"dtype": torch.float64}, TypeError, "to torch.float64"),
    ({"b_scale": torch.ones(2, 1).double()}, TypeError, "takes scales in fp32"),
    ({"b": torch.zeros(2, 48).char()}, ValueError, r"takes \[M, K\] and \[N, K\], got shapes \(4, 32\) and \(2, 48\)"),
    ({"a_scale": torch.ones(3, 1)}, ValueError, r"a scale for each row, got shape \(3, 1\)"),
    ({"a": torch.zeros(4, 24).char(), "b": torch.zeros(2, 24).char()}, ValueError, "multiples of 16, got K 24"),
])  # fmt: skip
def test_what_it_does_not_take_it_refuses(change, error, says):
    given = {"a": torch.zeros(4, 32).char(), "a_scale": torch.ones(4, 1), "b": torch.zeros(2, 32).char()}
    given |= {"b_scale": torch.ones(2, 1), "dtype": torch.bfloat16}
    with pytest.raises(error, match=says):
        int8_product(**{**given, **change})


@pytest.mark.parametrize("inner", [PIECE, PIECE + 16, 3 * PIECE - 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_sum_is_too_long_for_int32(inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """All codes are the largest ones, or some of them cancel. Every product that is asked for fits."""
    longest = []

    def product(a, a_scale, b, b_scale, dtype):
        longest.append(int((a.double() @ b.double().t()).abs().max()))
        assert a.shape[1] % MULTIPLE == 0
        return product_twin(a, a_scale, b, b_scale, dtype)

    monkeypatch.setattr("sagekernels.int8_matmul.INT8_PRODUCT", product)
    a, b = torch.full((3, inner), 127, dtype=torch.int8), torch.full((2, inner), -127, dtype=torch.int8)
    a[1, ::2], b[1] = -127, torch.randint(-127, 128, (inner,), generator=torch.Generator().manual_seed(0))
    a_scale, b_scale = torch.tensor([[0.5], [3e-7], [1e5]]), torch.tensor([[0.25], [4.0]])
    found, truth = (
        how(a, a_scale, b, b_scale, kind) for how, kind in ((int8_product, dtype), (product_twin, torch.float64))
    )
    assert max(longest) < 2**31 <= (133_144 + 1) * 127**2
    assert found.dtype == dtype
    most = a.double().abs() @ b.double().abs().t() * a_scale * b_scale.t()
    bound = 4 * torch.finfo(torch.float32).eps * most + torch.finfo(dtype).eps / 2 * truth.abs()
    assert ((found.double() - truth).abs() <= bound).all()
