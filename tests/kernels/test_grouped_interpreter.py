"""The Triton kernels of mixtures of experts on Triton's interpreter agree with float64 and with their twins.

test_sage_interpreter.py starts the process that interprets.
"""

import sys

import pytest
import torch
from torch import Tensor

from interpreted import INSIDE, find, poisoned_memory  # noqa: F401

if INSIDE:
    from kernel_inputs import ACTIVATED, random_choices, random_swiglu, swiglu_gradients_error
    from sagekernels import casts, grouped, grouped_casts, grouped_products, grouped_swiglu
    from sagekernels.casts import E4M3, INT8

    swiglu = sys.modules["sagekernels.swiglu"]  # The package has a function of this name.
    every_number = pytest.mark.parametrize("number", [INT8, E4M3], ids=str)

    LOADS = (0, 17, 128, 1, 129, 0, 40, 0)
    TOP = 3
    CHOICES = random_choices(LOADS, TOP)
    ROWS = grouped.plan_rows_twin(CHOICES, len(LOADS), 400)

    def normal(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    # -- rows ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("room", [400, 200])
    def test_plans_are_those_of_the_sort(room, monkeypatch):
        """Some choices have no expert here. Loads are odd, rows are too many or too few, and a choice may repeat."""
        monkeypatch.setattr(grouped, "PLAN_BLOCKS", 4)
        again = torch.cat((CHOICES, CHOICES[:, :1]), 1)
        for choices in (CHOICES.int() - 3, again.t().contiguous().t(), CHOICES[:0]):
            found = grouped.plan_rows_triton(choices, len(LOADS), room)
            for name, ours, twin in zip(
                found._fields, found, grouped.plan_rows_twin(choices, len(LOADS), room), strict=True
            ):
                assert torch.equal(ours, twin) and ours.dtype == twin.dtype, name

    def test_one_expert_has_all_rows(monkeypatch):
        """One expert has more tiles than a program writes at a time."""
        monkeypatch.setattr(grouped, "PLAN_TOKENS", 1024)
        plans = grouped.plan_rows_triton, grouped.plan_rows_twin
        found, twin = (plan(torch.zeros(4500, 1).long(), 1, 4500) for plan in plans)
        assert all(torch.equal(*pair) for pair in zip(found, twin, strict=True))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_rows_are_gathered_and_combined(dtype, monkeypatch):
        """Rows are strided, and longer than a program's part. Empty rows are zeros whatever tokens hold."""
        monkeypatch.setattr(grouped, "COLUMNS", 64)
        choices = random_choices((0, 5, 7, 1), 2)
        rows = grouped.plan_rows_twin(choices, 4, 16)
        for columns, magnitude in ((80, 1e30), (33, 1e-30)):
            x, y = (magnitude * normal(1, n, columns + 7) for n in (len(choices), 16))
            x, y = x.to(dtype)[:, 3 : columns + 3], y.to(dtype)[:, 3 : columns + 3]
            for one, other in ((x, y), (x.t().contiguous().t(), y.t().contiguous().t())):
                assert torch.equal(grouped.gather_triton(one, rows.choice, 2), grouped.gather_twin(x, rows.choice, 2))
                found, twin = grouped.combine_triton(other, rows.slot), grouped.combine_twin(y, rows.slot)
                if dtype == torch.bfloat16:  # The interpreter truncates.
                    assert ((found.float() - twin.float()).abs() <= 2**-7 * twin.float().abs()).all()
                else:
                    assert torch.equal(found, twin)

    # -- products --------------------------------------------------------------------------------------------------

    def codes(seed: int, number: torch.dtype, *shape: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        if number == INT8:
            return torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
        return (100 * torch.randn(shape, generator=draw)).clamp(-448, 448).to(number)

    def scales(seed: int, *shape: int) -> Tensor:
        return torch.exp2(8 * normal(seed, *shape))

    def check(found: Tensor, truth: Tensor, terms: Tensor) -> None:
        """Check a product against float64. fp32 errs by last places of the sum of the magnitudes of all terms. The
        interpreter truncates to bfloat16, which costs an eps."""
        bound = torch.finfo(found.dtype).eps * truth.abs() + 8 * torch.finfo(torch.float32).eps * terms
        assert found.shape == truth.shape and ((found.double() - truth).abs() <= bound).all()

    def check_codes(number: torch.dtype, columns: int, inner: int, dtype: torch.dtype) -> None:
        """Check the product of rows. Codes of empty rows, and scales of rows that are another expert's, are NaN."""
        a, b = codes(1, number, 400, inner), codes(2, number, len(LOADS), columns, inner)
        a_scale, b_scale = scales(3, 400, 1), scales(4, len(LOADS), columns)
        a_scale[sum(LOADS) :] = a_scale[144] = torch.nan
        found = grouped_products.grouped_codes_product_triton(a, a_scale, b, b_scale, ROWS.ends, ROWS.tiles, dtype)
        truth = grouped_products.grouped_codes_product_twin(
            a, a_scale, b, b_scale, ROWS.ends, ROWS.tiles, torch.float64
        )
        magnitudes = (x.float().abs() for x in (a, b))
        (ours, theirs), ends = magnitudes, ROWS.ends
        terms = grouped_products.grouped_codes_product_twin(
            ours, a_scale, theirs, b_scale, ends, ROWS.tiles, torch.float64
        )
        assert found[144].isnan().all() and not found[sum(LOADS) :].any()
        found[144], truth[144], terms[144] = 0, 0, 0
        check(found, truth, terms)

    def check_weight_codes(number: torch.dtype, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        """Check the gradient of weights. What is behind the last tile is not read, and NaN stays with its expert."""
        padded = grouped.TILE * len(ROWS.tiles)
        a, b = codes(1, number, outputs, padded), codes(2, number, inputs, padded)
        place = torch.arange(padded)
        for tile, (expert, begin, end, _) in enumerate(ROWS.tiles.tolist()):
            if expert >= 0:
                rest = slice(grouped.TILE * tile + max(0, min(grouped.TILE, end - begin)), grouped.TILE * (tile + 1))
                a[:, place[rest]], b[:, place[rest]] = 0, 0
        a_scale, b_scale = scales(3, len(LOADS), outputs), scales(4, len(LOADS), inputs)
        a_scale[2, 1] = torch.nan
        how = a, a_scale, b, b_scale, ROWS.first
        found = grouped_products.grouped_codes_weight_product_triton(*how, dtype)
        truth = grouped_products.grouped_codes_weight_product_twin(*how, torch.float64)
        how = a.float().abs(), a_scale, b.float().abs(), b_scale, ROWS.first
        terms = grouped_products.grouped_codes_weight_product_twin(*how, torch.float64)
        assert found[2, 1].isnan().all() and not found[0].any() and not found[-1].any()
        found[2, 1], truth[2, 1], terms[2, 1] = 0, 0, 0
        check(found, truth, terms)

    @every_number
    def test_products_of_codes(number):
        check_codes(number, 144, 80, torch.float32)
        check_weight_codes(number, 16, 130, torch.bfloat16)

    def test_products_of_few_codes():
        check_codes(INT8, 16, 16, torch.bfloat16)
        check_weight_codes(INT8, 144, 16, torch.float32)

    def test_sums_of_codes_are_exact():
        """All codes are the largest ones with one sign: 127^2 times 1,200 is more than float32 counts exactly."""
        a = torch.full((128, 1200), 127, dtype=torch.int8)
        a[:, 0] = 126
        table, scale = grouped.tiles_twin(torch.tensor([128]), 128)[0], torch.ones(128, 1)
        b = a[None, :1]
        found = grouped_products.grouped_codes_product_triton(
            a, scale, b, scale[None, 0], ROWS.ends, table, torch.float32
        )
        assert (found == float(126**2 + 1199 * 127**2)).all()

    @pytest.mark.parametrize(("dtype", "columns", "inner"), [
        (torch.bfloat16, 130, 33), (torch.float32, 1, 16),
    ])  # fmt: skip
    def test_products_in_the_dtype_of_rows(dtype, columns, inner):
        """Weights lie either way, and rows are strided. Rows of no expert are NaN, and one row of an expert is."""
        x, y = normal(1, 400, inner + 3).to(dtype)[:, 2:-1], normal(2, 400, columns + 5).to(dtype)[:, :columns]
        weight = normal(3, len(LOADS), columns, inner).to(dtype)
        for rows in (x, y):
            rows[sum(LOADS) :] = rows[144] = torch.nan
        for rows, matrix in ((x, weight.mT), (y, weight), (x.t().contiguous().t(), weight.mT.contiguous())):
            found = grouped_products.grouped_product_triton(rows, matrix, ROWS.tiles)
            truth = grouped_products.grouped_product_twin(rows.double(), matrix.double(), ROWS.ends)
            terms = grouped_products.grouped_product_twin(rows.double().abs(), matrix.double().abs(), ROWS.ends)
            assert found[144].isnan().all() and not found[sum(LOADS) :].any()
            found[144], truth[144], terms[144] = 0, 0, 0
            check(found, truth, terms)
        found = grouped_products.grouped_weight_product_triton(y, x, ROWS.ends)
        truth = grouped_products.grouped_weight_product_twin(y.double(), x.double(), ROWS.ends)
        terms = grouped_products.grouped_weight_product_twin(y.double().abs(), x.double().abs(), ROWS.ends)
        assert found[2].isnan().all() and not found[0].any() and not found[-1].any()
        found[2], truth[2], terms[2] = 0, 0, 0
        check(found, truth, terms)

    def test_what_nobody_has_is_cleared():
        """torch's own products leave the empty rows, and the experts without rows."""
        out = torch.full((400, 130), torch.nan)
        out[: sum(LOADS)] = 1
        grouped_products.clear_rows(out, ROWS.tiles)
        assert (out[: sum(LOADS)] == 1).all() and not out[sum(LOADS) :].any()
        out = torch.full((len(LOADS), 100, 70), torch.nan)
        grouped_products.clear_experts(out, ROWS.ends)
        assert [not matrix.any() for matrix in out] == [load == 0 for load in LOADS]
        assert out[1].isnan().all()

    def test_mistakes_in_products_are_found(monkeypatch):
        mistakes = [
            ("_codes_product_kernel", "b = load_codes(B, expert * columns + left", "b = load_codes(B, left"),
            ("_codes_product_kernel", "expert * columns + column", "column"),
            ("_codes_product_kernel", "A_SCALE + row", "A_SCALE + tl.arange(0, BLOCK_M)"),
            ("_codes_product_kernel", "(expert >= 0) & (top < end), inner", "top < end, inner"),
            ("codes_kernel", "A_SCALE += expert * rows", "A_SCALE += 0"),
            ("codes_kernel", "FIRST + expert + 1) * TILE", "FIRST + expert + 1) * TILE - BLOCK_K"),
            ("codes_kernel", "(FIRST + expert) * TILE,", "(FIRST + expert) * TILE + BLOCK_K,"),
        ]
        find(monkeypatch, lambda: check_codes(INT8, 32, 32, torch.float32), grouped_products, mistakes[:4])
        find(monkeypatch, lambda: check_weight_codes(INT8, 32, 32, torch.float32), grouped_products, mistakes[4:])

    # -- casts -----------------------------------------------------------------------------------------------------

    def same(ours: Tensor, twin: Tensor) -> None:
        if ours.dtype != torch.float32:  # FP8 has two zeros.
            ours, twin = ours.view(torch.uint8), twin.view(torch.uint8)
        assert torch.equal(ours, twin)

    FEW = random_choices((0, 17, 129, 0), TOP)
    FEW_ROWS = grouped.plan_rows_twin(FEW, 4, 200)

    def check_casts(number: torch.dtype, columns: int, gathers: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        """Check all codes and scales against the twin, bit for bit. Rows are of any magnitude, and some are zeros."""
        choice, _, ends, _, tiles, first, _ = FEW_ROWS
        x = normal(1, len(FEW) if gathers else 200, columns + 3)[:, 1:-2]
        x = (x * torch.exp2(40 * normal(2, len(x), 1))).to(dtype)
        x[::7], x[:, 1::9] = 0, 1e-35
        codes, scale, turned, turned_scale = grouped_casts.grouped_casts_triton(
            x, choice, tiles, first, TOP, number, gathers
        )
        known, own = slice(0, ends[-1]), slice(0, grouped.TILE * first[-1])
        twin = grouped_casts.row_casts_twin(x, choice, TOP, number, gathers)
        same(codes[known], twin.codes[known])
        same(scale[known], twin.scale[known])
        twins = grouped_casts.turned_casts_twin(x, choice, ends, first, TOP, number, gathers, len(tiles))
        same(turned[:, own], twins[0][:, own])
        same(turned_scale, twins[1])

    @every_number
    def test_casts_of_rows(number):
        if number == INT8:
            check_casts(number, 33, gathers=True)
        else:
            check_casts(number, 130, gathers=False, dtype=torch.float32)

    @every_number
    def test_casts_of_rows_alone(number, monkeypatch):
        """Rows are longer than a program's part. Empty rows of tokens are zeros."""
        monkeypatch.setattr(grouped_casts, "ROW_COLUMNS", 16)
        choice = ROWS.choice[sum(LOADS) - 20 :][:30]
        for gathers, length in ((True, len(CHOICES)), (False, 30)):
            x = (normal(1, length, 36) * torch.exp2(40 * normal(2, length, 1))).bfloat16()[:, 3:]
            found = grouped_casts.row_casts_triton(x, choice, TOP, number, gathers)
            for ours, twin in zip(found, grouped_casts.row_casts_twin(x, choice, TOP, number, gathers), strict=True):
                same(ours, twin)

    @every_number
    def test_casts_of_weights(number):
        for shape in ((2, 140, 33), (1, 9, 16)):
            weight = (normal(1, *shape) * torch.exp2(40 * normal(2, shape[0], 1, shape[2]))).bfloat16()
            twins = grouped_casts.weight_casts_twin(weight, number)
            for ours, twin in zip(grouped_casts.weight_casts_triton(weight, number), twins, strict=True):
                same(ours, twin)

    def test_what_is_not_finite_stays_with_its_row_and_column():
        x = normal(1, 200, 32)
        x[16, 5], x[140, 7] = torch.nan, torch.inf
        choice, _, ends, _, tiles, first, _ = FEW_ROWS
        found = grouped_casts.grouped_casts_triton(x, choice, tiles, first, TOP, INT8, False)
        assert found[1][: ends[-1], 0].isnan().nonzero().tolist() == [[16], [140]]
        assert found[3].isnan().nonzero().tolist() == [[1, 5], [2, 7]]

    def test_mistakes_in_casts_are_found(monkeypatch):
        mistakes = [
            ("largest_kernel", "step * ROWS", "step"),
            ("largest_kernel", "expert * columns + column", "column"),
            ("load_rows", "(row < end)[:, None]", "(row < 200)[:, None]"),
            ("_grouped_round_kernel", "tile == tl.load(FIRST + expert)", "tile == 0"),
            ("_grouped_round_kernel", "start = tile * TILE", "start = tile * TILE - expert"),
            ("load_rows", "// TOP", "// (TOP + 1)"),
        ]
        monkeypatch.setitem(casts.LARGEST, "ROWS", 64)
        find(monkeypatch, lambda: check_casts(INT8, 16, gathers=False), casts, mistakes[:2])
        find(monkeypatch, lambda: check_casts(INT8, 16, gathers=False), grouped_casts, mistakes[2:-1])
        find(monkeypatch, lambda: check_casts(INT8, 16, gathers=True), grouped_casts, mistakes[-1:])

    # -- SwiGLU ----------------------------------------------------------------------------------------------------

    def check_swiglu(columns: int, magnitude: float, dtype: torch.dtype) -> None:
        """Check SwiGLU and its gradients against float64, and largest magnitudes exactly. Empty rows are NaN."""
        choice, slot, ends, _, tiles, first, _ = FEW_ROWS
        grad, gate, up = random_swiglu(200, columns, magnitude, dtype)
        gate_up = torch.cat((gate, up, gate[:, :3]), 1)[:, : 2 * columns]
        own = slice(0, ends[-1])
        grad[ends[-1] :] = gate_up[ends[-1] :] = torch.nan
        weights = normal(5, *slot.shape).sigmoid()
        weights[slot < 0] = torch.nan
        y, largest = grouped_swiglu.weighted_swiglu_triton(gate_up, None, weights, choice, ends, tiles, "swiglu", True)
        assert torch.equal(largest, grouped_casts.grouped_largest_twin(y, ends))
        weight = weights.flatten()[choice[own].long(), None].double()
        exact = torch.nn.functional.silu(gate[own].double()) * up[own].double() * weight
        eps = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6  # The interpreter truncates.
        assert ((y[own].double() - exact).abs() <= eps * exact.abs() + 1e-38).all() and not y[ends[-1] :].any()
        how = gate_up, None, weights, choice, ends, tiles, "swiglu", False
        assert grouped_swiglu.weighted_swiglu_triton(*how)[1].numel() == 0
        whole, of_weights, _, largest = grouped_swiglu.weighted_swiglu_gradients_triton(
            grad, gate_up, None, weights, choice, slot, ends, tiles, first, "swiglu", True
        )
        assert torch.equal(largest, grouped_casts.grouped_largest_twin(whole, ends))
        assert not whole[ends[-1] :].any()
        weighted = grad[own].double() * weight
        limit = 2.1 if dtype == torch.bfloat16 else 1
        assert swiglu_gradients_error(whole[own], weighted, gate[own], up[own]) <= limit
        terms = grad[own].double() * torch.nn.functional.silu(gate[own].double()) * up[own].double()
        exact, bound = torch.zeros(slot.numel()).double(), torch.zeros(slot.numel()).double()
        exact[choice[own].long()], bound[choice[own].long()] = terms.sum(1), terms.abs().sum(1)
        assert ((of_weights.flatten() - exact).abs() <= 2e-6 * bound + 1e-38).all()

    @pytest.mark.parametrize(("columns", "magnitude", "dtype"), [
        (40, 1.0, torch.bfloat16), (20, 1e-12, torch.float32), (33, 1e12, torch.float32),
    ])  # fmt: skip
    def test_weighted_swiglu(columns, magnitude, dtype, monkeypatch):
        """Rows take more programs than one."""
        monkeypatch.setattr(swiglu, "COLUMNS", 32)
        monkeypatch.setattr(swiglu, "ROWS", 32)
        check_swiglu(columns, magnitude, dtype)

    def test_mistakes_in_swiglu_are_found(monkeypatch):
        mistakes = [
            ("_load_halves", "WEIGHTS + choice", "WEIGHTS + row"),
            ("swiglu_kernel", "(row < end) & (expert >= 0)", "row < end"),
            ("swiglu_gradients_kernel", "(row < end) & (expert >= 0)", "row < end"),
            ("swiglu_kernel", "expert * columns + column", "column"),
            ("swiglu_kernel", "tl.maximum(of_columns, bits)", "bits"),
            ("swiglu_gradients_kernel", "grad *= weight", "grad *= 1.0"),
            ("swiglu_gradients_kernel", "of_columns + columns, widened", "of_columns, widened"),
            ("_sum_parts_kernel", "total +=", "total ="),
        ]
        monkeypatch.setattr(swiglu, "COLUMNS", 16)
        monkeypatch.setattr(swiglu, "ROWS", 64)
        find(monkeypatch, lambda: check_swiglu(20, 1.0, torch.float32), swiglu, mistakes[:-1])
        find(monkeypatch, lambda: check_swiglu(20, 1.0, torch.float32), grouped_swiglu, mistakes[-1:])

    def check_activation(activation: str, biased: bool, dtype: torch.dtype) -> None:
        """Check an activation of experts with 0, 1, 17, 128 and 129 rows and its gradients against float64 and the
        twin, and largest magnitudes exactly. Empty rows are NaN."""
        choice, slot, ends, _, tiles, first, _ = ROWS
        gate_up, grad, weights = 5 * normal(1, 400, 40), normal(2, 400, 20), normal(3, *slot.shape).sigmoid()
        gate_up, grad, bias = gate_up.to(dtype), grad.to(dtype), 2 * normal(4, len(ends), 40).to(dtype)
        gate_up[3, :5], bias[0] = torch.tensor([80.0, -80.0, 200.0, -200.0, 0.0]), 100.0  # It has no row.
        own, expert = slice(0, ends[-1]), torch.searchsorted(ends, torch.arange(400), right=True)
        grad[ends[-1] :] = gate_up[ends[-1] :] = torch.nan
        weights[slot < 0] = torch.nan
        leaves = [x.double().requires_grad_() for x in (gate_up, bias, weights)]
        x = leaves[0][own] + leaves[1][expert[own]] * biased
        exact = ACTIVATED[activation](*x.chunk(2, 1)) * leaves[2].flatten()[choice[own].long(), None]
        truth = torch.autograd.grad(exact, leaves, grad[own].double(), materialize_grads=True)
        given = gate_up, bias if biased else None, weights, choice
        for way in ("triton", "twin"):
            y, largest = getattr(grouped_swiglu, f"weighted_swiglu_{way}")(*given, ends, tiles, activation, True)
            found = getattr(grouped_swiglu, f"weighted_swiglu_gradients_{way}")(
                grad, *given, slot, ends, tiles, first, activation, True
            )
            eps = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4e-6  # The interpreter truncates.
            for ours, right in ((y[own], exact), (found[0], truth[0])):
                torch.testing.assert_close(ours.double(), right.double(), rtol=eps, atol=eps)
            torch.testing.assert_close(found[1].double(), truth[2], rtol=1e-5, atol=1e-4)
            assert not y[ends[-1] :].any() and found[1].dtype == torch.float32
            if biased:
                torch.testing.assert_close(found[2].double(), truth[1], rtol=1e-5, atol=1e-4)
            for written, measured in ((y, largest), (found[0], found[3])):
                assert torch.equal(measured, grouped_casts.grouped_largest_twin(written, ends))

    @pytest.mark.parametrize(("activation", "biased", "dtype"), [
        ("geglu", False, torch.float32), ("swiglu", True, torch.float32),
        ("clamped_swiglu", True, torch.float32), ("clamped_swiglu", True, torch.bfloat16),
    ])  # fmt: skip
    def test_other_activations_and_biases(activation, biased, dtype, monkeypatch):
        monkeypatch.setattr(swiglu, "COLUMNS", 16)
        monkeypatch.setattr(swiglu, "ROWS", 64)
        monkeypatch.setattr(grouped_swiglu, "SUM_COLUMNS", 16)
        check_activation(activation, biased, dtype)

    def test_mistakes_in_activations_and_biases_are_found(monkeypatch):
        mistakes = [
            ("_load_bias", "BIAS + expert * 2", "BIAS + 4 * 2"),
            ("_load_bias", "at + columns", "at"),
            ("_limited", "up < -LIMIT", "up < 2 * -LIMIT"),
            ("swiglu_gradients_kernel", "whole_gate > LIMIT", "whole_gate > 2 * LIMIT"),
            ("swiglu_gradients_kernel", "tl.abs(whole_up) > LIMIT", "whole_up > LIMIT"),
            ("swiglu_gradients_kernel", "gate_sums + of_gate", "of_gate"),
            ("_sum_tiles_kernel", "total +=", "total ="),
        ]
        monkeypatch.setattr(swiglu, "COLUMNS", 32)
        monkeypatch.setattr(swiglu, "ROWS", 64)
        find(monkeypatch, lambda: check_activation("clamped_swiglu", True, torch.float32), swiglu, mistakes[:-1])
        find(
            monkeypatch, lambda: check_activation("clamped_swiglu", True, torch.float32), grouped_swiglu, mistakes[-1:]
        )
        of_gelu = [("_sigmoid", "3.0 * square", "square"), ("_sigmoid", "inner *= 1.0 + square", "inner *= 1.0")]
        find(monkeypatch, lambda: check_activation("geglu", False, torch.float32), swiglu, of_gelu)

    def test_known_largest_magnitudes_change_no_bit_of_a_cast():
        choice, _, ends, _, tiles, first, _ = FEW_ROWS
        x = normal(1, 200, 40)
        how = x, choice, tiles, first, TOP, INT8, False
        known = grouped_casts.grouped_casts_triton(*how, grouped_casts.grouped_largest_twin(x, ends))
        for ours, theirs in zip(known, grouped_casts.grouped_casts_triton(*how), strict=True):
            same(ours[: ends[-1]], theirs[: ends[-1]])
