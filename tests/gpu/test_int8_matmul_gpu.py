"""The product of INT8 codes with their scales on a GPU agrees with float64."""

import pytest
import torch

from on_gpu import needs_gpu
from sagekernels.hopper_int8 import hopper_int8_product, takes
from sagekernels.int8_matmul import int8_product, int8_product_triton, product_twin

pytestmark = needs_gpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 16), (300, 130, 48), (4096, 2048, 1024), (257, 129, 16_400)], ids=str)
def test_products_are_within_roundings(sizes, dtype):
    """The results do not depend on what their memory held. Rows have scales of their own, and one scale is not a
    number."""
    rows, columns, inner = sizes
    draw = torch.Generator("cuda").manual_seed(rows)
    how = {"device": "cuda", "generator": draw}
    a, b = (torch.randint(-127, 128, (n, inner), dtype=torch.int8, **how) for n in (rows, columns))
    a_scale, b_scale = (torch.exp2(8 * torch.randn(n, 1, **how)) for n in (rows, columns))
    truth = product_twin(a, a_scale, b, b_scale, torch.float64)
    torch.full((2**26,), torch.nan, device="cuda")
    found = int8_product(a, a_scale, b, b_scale, dtype)
    bound = (4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2) * truth.abs()
    assert ((found.double() - truth).abs() <= bound).all()
    if takes(columns) and torch.cuda.get_device_capability() == (9, 0):
        crowded = hopper_int8_product(a, a_scale, b, b_scale, dtype, crowded=True)  # Tiles come from a counter.
        assert torch.equal(crowded, int8_product_triton(a, a_scale, b, b_scale, dtype))
    a_scale[-1] = torch.nan
    found = int8_product(a, a_scale, b, b_scale, dtype)
    assert found[-1].isnan().all() and found[:-1].isfinite().all()


def test_sums_past_int32():
    """All codes are the largest ones, and a result sums 262,144 products."""
    a, b = (torch.full((n, 262_144), 127, dtype=torch.int8, device="cuda") for n in (200, 130))
    ones = [torch.ones(len(codes), 1, device="cuda") for codes in (a, b)]
    found = int8_product(a, ones[0], -b, ones[1], torch.float32)
    assert torch.equal(found, product_twin(a, ones[0], -b, ones[1], torch.float32))


def test_offsets_past_31_bits():
    """The result has 65,536 rows of 32,784 numbers, so its offsets exceed 31 bits."""
    draw = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randint(-127, 128, (n, 16), dtype=torch.int8, device="cuda", generator=draw) for n in (65_536, 32_784)
    )
    ones = [torch.ones(len(codes), 1, device="cuda") for codes in (a, b)]
    found = int8_product(a, ones[0], b, ones[1], torch.bfloat16)
    assert found.numel() > 2**31
    assert torch.equal(found[-8:], product_twin(a[-8:], ones[0][-8:], b, ones[1], torch.bfloat16))
