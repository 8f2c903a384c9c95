"""Muon's kernels on a GPU agree with their twins and with float64, and a matrix has the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from muon_updates import FORMS, assert_same_passes, gradients_of, muon_of, weights_of_all
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


@pytest.mark.parametrize(("moments", "master"), FORMS)
def test_passes_take_many_parts_at_once(moments: str, master: str) -> None:
    """Pieces begin anywhere, as ZeRO cuts them, or where 16 bytes are read at a time."""
    for nesterov, dtype, shift in ((True, torch.float32, 0), (True, torch.bfloat16, 1), (False, torch.float32, 1)):
        assert_same_passes(moments, master, nesterov, dtype, "cuda", shift)


def test_updates_are_those_of_twins_and_the_same_twice() -> None:
    """The twins take one matrix after the other on the CPU. On the GPU graphs are replayed from the second update
    on, or none is recorded."""
    ends = []
    for device, recorded in (("cuda", True), ("cuda", False), ("cpu", False)):
        optimizer = muon_of([(40, 64), (64, 40), (300, 64)] * 3, "fp32", "fp32", device)
        assert (optimizer._record is not None) == (device == "cuda")
        optimizer._record = optimizer._record if recorded else None
        for update in (1, 2, 3):
            optimizer.step(gradients_of(optimizer, update), 1e-2, update, 0.5)
        ends.append([weight.cpu() for weight in weights_of_all(optimizer)])
    for first, second, twin in zip(*ends, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, twin, rtol=0, atol=2e-3)
