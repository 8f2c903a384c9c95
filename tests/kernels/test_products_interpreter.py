"""The Triton kernels of INT8 products and of Muon on Triton's interpreter agree with float64 and with their twins.

test_sage_interpreter.py starts the process that interprets.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interpreted import INSIDE, find

if INSIDE:
    from muon_updates import FORMS, assert_same_passes, gradients_of, muon_of, weights_of_all
    from sagekernels import muon
    from sagekernels.int8_matmul import ProductTile, int8_product_triton, product_twin
    from sagetrain.optim import muon as optim_muon

    every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)

    def factor(seed: int, rows: int, columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return codes of all possible values, and scales."""
        draw = torch.Generator().manual_seed(seed)
        codes = torch.randint(-127, 128, (rows, columns), generator=draw, dtype=torch.int8)
        return codes, scale * (0.5 + torch.rand(rows, 1, generator=draw))

    def check(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, tile: ProductTile | None = None
    ) -> None:
        """Check that the result is within float32's roundings of the sum and of two scales, and the rounding to dtype,
        of the float64 result. The interpreter truncates to bfloat16, which costs an eps. A GPU is off by half an eps at
        most."""
        truth = product_twin(*a, *b, torch.float64)
        found = int8_product_triton(*a, *b, dtype, tile)
        assert found.dtype == dtype and found.shape == truth.shape
        least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        bound = (4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps) * truth.abs() + least
        assert ((found.double() - truth).abs() <= bound).all()

    @every_dtype
    @pytest.mark.parametrize(("rows", "columns", "inner"), [
        (1, 1, 16), (17, 64, 48), (64, 130, 144), (130, 17, 528), (257, 129, 64), (3, 300, 16),
    ])  # fmt: skip
    def test_every_size(rows, columns, inner, dtype):
        """Sizes fill tiles or not. The results do not depend on what their memory held."""
        scale = 1e-3 if dtype == torch.float16 else 1.0
        torch.full((rows, columns), torch.nan, dtype=dtype)  # The result may come to lie in this memory.
        check(factor(1, rows, inner, scale), factor(2, columns, inner), dtype)

    @pytest.mark.parametrize("tile", [ProductTile(16, 32, 16, 1, 1), ProductTile(128, 128, 128, 4, 3)], ids=str)
    def test_more_tiles_than_a_group_has(tile):
        """Each result is computed once. With 11 by 3 tiles the last group is smaller."""
        check(factor(1, 11 * 16 - 3, 80), factor(2, 70, 80), torch.float32, tile)

    @every_dtype
    def test_any_magnitude(dtype):
        """The product of two scales may be less than any float, even if the product of all three factors is not."""
        scales = [(1e-30, 1e30), (1e30, 1e-30), (1e-10, 1e-10), (1e-38, 1.0)]
        for one, other in scales if dtype != torch.float16 else [(1e-30, 1e28), (1e-4, 1.0)]:
            check(factor(1, 33, 64, one), factor(2, 20, 64, other), dtype)
        zeros = torch.zeros(5, 32, dtype=torch.int8), torch.full((5, 1), 1e-38)
        assert (int8_product_triton(*zeros, *factor(2, 4, 32), dtype) == 0).all()

    def test_sums_are_exact():
        """All codes are the largest ones with one sign: 127^2 times 4,096 is more than float32 counts exactly."""
        a = torch.full((3, 4096), 127, dtype=torch.int8)
        one = torch.ones(3, 1)
        found = int8_product_triton(a, one, -a, one, torch.float32)
        assert (found == -float(127**2 * 4096)).all()
        a[0, 0], a[1, 1] = 126, -127
        found = int8_product_triton(a, one, a, one, torch.float32).double()
        assert torch.equal(found, (a.double() @ a.double().t()).float().double())

    def test_what_is_not_finite_shows():
        a, b = factor(1, 20, 32), factor(2, 10, 32)
        a[1][3], b[1][7] = torch.nan, torch.inf
        found = int8_product_triton(*a, *b, torch.bfloat16)
        assert found[3].isnan().all() and not found[:, 7].isfinite().any()
        found[3], found[:, 7] = 0, 0
        assert found.isfinite().all()

    def test_strides_and_offsets_of_operands():
        """Operands are transposed matrices, and codes that do not begin at a multiple of 16 bytes."""
        a, scale = factor(1, 48, 40)
        other = factor(2, 20, 48)
        check((a.t(), scale[:40]), other, torch.float32)
        loose = torch.empty(48 * 21 + 1, dtype=torch.int8)[1:].view(21, 48)
        loose.copy_(factor(3, 21, 48)[0])
        check((loose, torch.ones(21, 1)), (other[0], other[1].expand(20, 2)[:, 1:]), torch.float32)
        check((loose[:0], torch.ones(0, 1)), other, torch.float32)

    @pytest.mark.parametrize(("shape", "steps"), [((2, 70, 130), 1), ((2, 130, 70), 1), ((1, 64, 64), 2)])
    def test_muon_orthogonalizes_a_batch(shape, steps):
        """Matrices are wide, tall and square, and fill tiles or not. A matrix has the same bits in every batch."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=draw).bfloat16()
        found = muon.orthogonalize_triton(x.clone(), steps)
        twin = torch.stack([muon.orthogonalize_twin(matrix, steps) for matrix in x])
        assert found.is_contiguous() and (found - twin).norm() < 0.01 * twin.norm()
        assert torch.equal(muon.orthogonalize_triton(x[-1:].clone(), steps)[0], found[-1])

    def test_half_of_a_symmetric_product_is_computed():
        """Both halves are stored. What lies beyond the matrix is not touched."""
        x = torch.randn(2, 150, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
        memory = torch.full((2, 160, 160), 7.0, dtype=torch.bfloat16)
        half, whole = memory[:, :150, :150], torch.empty(2, 150, 150, dtype=torch.bfloat16)
        for addend, beta in ((None, 1.0), (torch.full_like(memory, 2.0)[:, :150, :150], -3.0)):
            muon.product(x, x, half, addend, 2.0, beta, symmetric=True)
            muon.product(x, x, whole, None if addend is None else torch.full_like(whole, 2.0), 2.0, beta)
            assert torch.equal(half, whole)
            truth = 2 * x.double() @ x.double().mT + (0 if addend is None else -6)
            assert ((half.double() - truth).abs() <= 2**-7 * truth.abs() + 1e-4).all()
        assert (memory[:, 150:] == 7).all() and (memory[:, :, 150:] == 7).all()

    class Counted:
        """A kernel that calls `noted` at each launch."""

        def __init__(self, kernel: Any, noted: Callable[[], None]) -> None:
            self.kernel, self.noted = kernel, noted

        def __getitem__(self, grid: Any) -> Any:
            self.noted()
            return self.kernel[grid]

    class Operators(TorchDispatchMode):
        """It counts the operators of torch that compute."""

        def __init__(self) -> None:
            super().__init__()
            self.counts = Counter[str]()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not (function.is_view or "empty" in str(function)):
                self.counts[str(function)] += 1
            return function(*args, **kwargs or {})

    @pytest.mark.parametrize(("moments", "master"), FORMS)
    def test_muons_passes_take_many_parts_at_once(moments, master):
        for nesterov, dtype, shift in ((True, torch.float32, 1), (False, torch.bfloat16, 0)):
            assert_same_passes(moments, master, nesterov, dtype, shift=shift)

    def test_mistakes_in_muons_passes_are_found(monkeypatch):
        find(monkeypatch, lambda: assert_same_passes("fp32", "fp32", True, shift=1), muon, [
            ("_directions_kernel", ") * clip", ")"),
            ("_directions_kernel", "place < left", "place <= left"),
            ("_add_updates_kernel", "UPDATES + first", "UPDATES"),
        ])  # fmt: skip
        find(monkeypatch, lambda: assert_same_passes("int8", "bf16_chance", True), muon, [
            ("_directions_kernel", "LARGEST.dtype) + begin", "LARGEST.dtype)"),
            ("_add_updates_kernel", "start + begin + place", "begin + place"),
            ("_add_updates_kernel", "tl.load(PARTS + 6)", "tl.load(PARTS + 5)"),
        ])  # fmt: skip

    def test_muon_launches_as_much_for_many_matrices(monkeypatch):
        """Launches and operators of torch do not depend on the number of matrices of a shape. An update is that of
        the twins, one matrix after the other."""
        launched, counts = list[str](), []
        for name in [name for name in vars(muon) if name.endswith("_kernel")]:
            monkeypatch.setattr(muon, name, Counted(getattr(muon, name), partial(launched.append, name)))
        monkeypatch.setattr(optim_muon, "orthogonalize", muon.orthogonalize_triton)
        for many in (1, 4):
            ours = muon_of([(40, 64), (64, 40)] * many, "fp32", "fp32")
            ours._together, given = True, gradients_of(ours, 1)
            launched.clear()
            with Operators() as operators:
                ours.step(given, 1e-2, 1, 0.5)
            counts.append((Counter(launched), operators.counts))
        assert counts[0] == counts[1]
        twins = muon_of([(40, 64), (64, 40)] * many, "fp32", "fp32")
        monkeypatch.undo()
        twins.step(given, 1e-2, 1, 0.5)
        for weight, expected in zip(weights_of_all(ours), weights_of_all(twins), strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=2e-3)
