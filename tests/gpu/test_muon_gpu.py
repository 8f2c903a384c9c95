"""Muon's kernels on a GPU agree with their twins and with float64, and a matrix has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from on_gpu import needs_gpu
from sagekernels import muon

pytestmark = needs_gpu()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("shape", [
    (2, 70, 130), (5, 704, 256), (3, 2048, 2048),
    *(pytest.param(shape, marks=pytest.mark.long) for shape in ((3, 512, 2048), (4, 2048, 5632))),
])  # fmt: skip
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    x = draw(*shape).bfloat16()
    found, twin = muon.orthogonalize(x.clone(), 5), torch.stack([muon.orthogonalize_twin(m, 5) for m in x])
    values = torch.linalg.svdvals(found[0].float())
    assert values.quantile(0.05) > 0.5 and values.max() < 1.35
    assert (found.float() - twin.float()).norm() < 0.03 * twin.float().norm()
    assert torch.equal(muon.orthogonalize(x[1:2].clone(), 5)[0], found[1])


@pytest.mark.parametrize(("rows", "depth"), [(70, 130), (300, 64), (2048, 96)])
def test_both_halves_of_a_symmetric_product_are_right(rows: int, depth: int) -> None:
    """The product is summed in fp32 and rounded once. The memory held NaN before."""
    x, addend = draw(3, rows, depth).bfloat16(), draw(3, rows, rows, seed=1)
    addend = (addend + addend.mT).bfloat16()
    for symmetric in (True, False):
        found = torch.full_like(addend, torch.nan)
        muon.product(x, x, found, addend, 2.0, -3.0, symmetric=symmetric)
        parts = 2 * x.double() @ x.double().mT, -3 * addend.double()
        bound = 2**-8 * (parts[0] + parts[1]).abs() + 1e-5 * (parts[0].abs() + parts[1].abs() + depth)
        assert ((found.double() - sum(parts)).abs() <= bound).all()
        assert torch.equal(found, found.mT) or not symmetric


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_passes_are_those_of_their_twins(nesterov: bool, dtype: torch.dtype) -> None:
    """Pieces begin anywhere, as ZeRO cuts them."""
    for first, count in ((0, 100_003), (1, 4097), (3, 1)):
        gradient, momentum = (draw(count + first, seed=n)[first:] for n in range(2))
        ours, theirs = ((momentum.clone(), momentum.to(torch.bfloat16)) for _ in range(2))
        for found, how in ((ours, muon.direction_triton), (theirs, muon.direction_twin)):
            how(found[0], gradient.to(dtype), found[1], 0.95, nesterov)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=2**-7, atol=1e-6)
        weights = [gradient.clone() for _ in range(2)]
        muon.add_update_triton(weights[0], ours[1], 0.999, -0.01)
        muon.add_update_twin(weights[1], ours[1], 0.999, -0.01)
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)
