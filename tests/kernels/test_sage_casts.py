"""Casts to 8 bits in both orientations, as an operator of torch: the twin, eager and compiled."""

import pytest
import torch

from sagekernels.casts import NUMBERS, QUANTIZE_BOTH, largest_twin, quantize, quantize_both

every_number = pytest.mark.parametrize("number", NUMBERS, ids=str)


def matrix(rows: int, columns: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=draw) * torch.exp2(3 * torch.randn(rows, 1, generator=draw))


@every_number
@pytest.mark.parametrize("rows", [48, 37])
def test_both_are_the_casts_of_the_matrix_and_of_its_transpose(number, rows):
    """Rows of zeros follow until the length of the sum is a multiple of 16."""
    x = matrix(rows, 20).bfloat16()
    for one in (x, x.t().contiguous().t()):
        rounded, turned = quantize_both(one, number)
        for found, expected in ((rounded, quantize(x, number)), (turned, quantize(x.t(), number))):
            assert torch.equal(found.scale, expected.scale)
            codes = found.codes.view(torch.uint8)
            assert found.codes.is_contiguous() and found.codes.dtype == number
            assert torch.equal(codes[:, : expected.codes.shape[1]], expected.codes.view(torch.uint8))
        assert turned.codes.shape == (20, 48)
        assert (turned.codes.float()[:, rows:] == 0).all()


@every_number
def test_known_largest_magnitudes_are_those_of_the_cast(number):
    """They are read, not found again."""
    x = matrix(37, 20).bfloat16()
    largest = largest_twin(x)
    for factor in (1, 2):  # Twice the largest magnitudes double the scales.
        known = (factor * largest.view(torch.float32)).view(torch.int32)
        for found, expected in zip(quantize_both(x, number, known), quantize_both(x, number), strict=True):
            assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8)) == (factor == 1)
            torch.testing.assert_close(found.scale, factor * expected.scale)


@every_number
def test_the_operator_keeps_its_promises(number):
    """The operator has its schema, and its empty results for torch.compile, with dims that change too."""
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(QUANTIZE_BOTH, (matrix(37, 20), number), test_utils=tests)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: quantize_both(2 * x, number), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (37, 48, 50):
        x = matrix(rows, 20)
        for found, expected in zip(compiled(x), quantize_both(2 * x, number), strict=True):
            assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(found.scale, expected.scale)


def test_what_it_does_not_take_it_refuses():
    with pytest.raises(TypeError, match=r"got torch\.float64 to torch\.int8"):
        quantize_both(torch.zeros(4, 4, dtype=torch.float64), torch.int8)
    with pytest.raises(TypeError, match=r"got torch\.float32 to torch\.uint8"):
        quantize_both(torch.zeros(4, 4), torch.uint8)
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        quantize_both(torch.zeros(4), torch.int8)
    with pytest.raises(ValueError, match=r"of 8 rows and columns, got shape \(4,\)"):
        quantize_both(torch.zeros(4, 4), torch.int8, torch.zeros(4, dtype=torch.int32))
