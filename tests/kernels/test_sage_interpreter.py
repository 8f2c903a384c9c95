"""The portable Triton kernels agree with the twin, tile for tile, in Triton's interpreter on the CPU.

The cases run in a process of their own (tests/support/interpreted.py). This file is the test that starts the process
with all files of such cases and, inside it, some of the cases.
"""

import math
import sys

import pytest
import torch

from interpreted import INSIDE, poisoned_memory, run_interpreted  # noqa: F401

if not INSIDE:

    def test_kernels_in_the_interpreter():
        run_interpreted()

else:
    from interpreted import find
    from kernel_inputs import (
        add_norm_errors,
        call_of,
        chunk_bounds,
        random_norm,
        random_swiglu,
        swiglu_gradients_error,
    )
    from qk_inputs import qk_norm_rope_errors, random_qk
    from sagekernels import add_norm
    from sagekernels.backward import triton_backward
    from sagekernels.call import Projection
    from sagekernels.casts import E4M3, INT8, NUMBERS, largest_twin, quantize_both_triton, quantize_both_twin
    from sagekernels.forward import document_bounds_triton, triton_forward
    from sagekernels.hopper_backward import FLOATS, _finish_dq_kernel, _prepare_queries_kernel
    from sagekernels.hopper_projection import finish_projection
    from sagekernels.qk_norm_rope import (
        qk_norm_rope_gradients_triton,
        qk_norm_rope_gradients_twin,
        qk_norm_rope_triton,
        qk_norm_rope_twin,
    )
    from sagekernels.quantize import in_half_units, quantize_triton, quantize_twin, token_mean, transpose_codes
    from sagekernels.reference import chunk_bounds as last_queries
    from sagekernels.reference import document_bounds, one_document, twin_backward, twin_forward
    from sagekernels.swiglu import swiglu_gradients_triton, swiglu_triton
    from sagekernels.testing import Shape, random_inputs, random_sinks, rel_l2

    COMPILER_IMPORTED = "torch._dynamo" in sys.modules

    # The columns are shape, recipe and dtype. The dtype is float16 where agreement must be close, because the
    # interpreter truncates to bfloat16.
    CASES = [
        (Shape(1, 128, 128, 1, 1, 64), "fine", torch.float16),
        (Shape(1, 130, 130, 2, 1, 32, causal=False), "fine", torch.float16),
        (Shape(1, 70, 133, 2, 1, 80), "fine", torch.float16),
        (Shape(1, 200, 200, 1, 1, 32, documents=(5, 0, 70, 1, 124, 0)), "fine", torch.float16),
        (Shape(1, 200, 200, 1, 1, 32, causal=False, documents=(5, 0, 70, 1, 124, 0)), "fine", torch.float16),
        (Shape(2, 70, 70, 2, 2, 16), "paper", torch.float16),
        (Shape(1, 100, 100, 1, 1, 32, documents=(40, 60)), "paper", torch.float16),
        (Shape(1, 130, 130, 2, 1, 32), "scores", torch.float16),
        (Shape(1, 100, 100, 1, 1, 80, causal=False, documents=(40, 60)), "scores", torch.bfloat16),
        (Shape(1, 200, 200, 1, 1, 32, documents=(5, 0, 70, 1, 124, 0), window=40), "fine", torch.float16),
        (Shape(1, 140, 140, 2, 1, 32, window=65), "scores", torch.float16),
        (Shape(1, 140, 140, 1, 1, 32, causal=False, window=10), "fine", torch.float16),
        (Shape(1, 140, 140, 1, 1, 32, window=1), "paper", torch.float16),
        (Shape(1, 65, 65, 1, 1, 192), "fine", torch.bfloat16),
        (Shape(1, 1, 65, 7, 1, 32), "fine", torch.bfloat16),
    ]

    def test_kernels_are_imported_without_the_compiler():
        """The compiler would double the time of the import."""
        assert not COMPILER_IMPORTED

    def check(call, do):
        """Check that the kernels agree with the twin."""
        o, saved = triton_forward(call)
        expected_o, expected = twin_forward(call)
        ours, twin = (call.backward(do, expected_o, expected) for _ in range(2))
        grads, expected_grads = triton_backward(ours), twin_backward(twin)

        assert torch.equal(saved.q.codes, expected.q.codes) and torch.equal(saved.k.codes, expected.k.codes)
        torch.testing.assert_close(saved.q.scale, expected.q.scale)
        torch.testing.assert_close(saved.lse, expected.lse, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(saved.sink_scores, expected.sink_scores, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.sink_terms, twin.sink_terms, atol=1e-5, rtol=1e-4)
        tolerance = 1e-3 if do.dtype == torch.float16 else 6e-3
        if call.recipe == "scores":  # dS, Q and K are in bfloat16, truncated.
            tolerance = 12e-3
        assert rel_l2(o, expected_o) < tolerance
        for name, a, b in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
            assert rel_l2(a, b) < tolerance, name

    @pytest.mark.parametrize(("shape", "recipe", "dtype"), CASES, ids=lambda x: str(x))
    def test_agrees_with_the_twin(shape, recipe, dtype):
        q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype)
        check(call_of(shape, q, k, v, recipe), do)

    @pytest.mark.parametrize(("recipe", "dtype"), [
        ("fine", torch.float16), ("paper", torch.float16), ("scores", torch.bfloat16),
    ])  # fmt: skip
    def test_queries_and_keys_of_different_tokens(recipe, dtype):
        shape = Shape(1, 90, 230, 2, 1, 32, causal=False)
        q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype)
        call = call_of(shape, q, k, v, recipe)
        check(call._replace(bounds=chunk_bounds(45, 115, ((30, 60, 1, 24), (50, 65)))), do)
        shape = Shape(2, 70, 200, 2, 1, 32, causal=False)
        windowed = last_queries(document_bounds(one_document(200, None), 200, 40), 1, 130, 70)
        q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype)
        check(call_of(shape, q, k, v, recipe)._replace(bounds=windowed), do)

    @pytest.mark.parametrize("shape", [
        Shape(1, 300, 300, 1, 1, 128, documents=(5, 0, 70, 1, 124, 100)),
        Shape(1, 140, 270, 1, 1, 128),
        Shape(1, 300, 300, 1, 1, 128, window=100),
    ], ids=str)  # fmt: skip
    def test_tiles_of_sm_90_agree_with_the_twin(shape, monkeypatch):
        """Programs have other sizes than TILE on the side that they own."""
        monkeypatch.setattr("sagekernels.launch.family", lambda capability: "sm_90")
        test_agrees_with_the_twin(shape, "fine", torch.float16)

    @pytest.mark.parametrize(("shape", "recipe", "dtype"), [
        (Shape(1, 200, 200, 2, 1, 32, documents=(5, 0, 70, 1, 124, 0)), "fine", torch.float16),
        (Shape(1, 70, 133, 2, 1, 80), "fine", torch.float16),
        (Shape(1, 65, 65, 1, 1, 128, causal=False), "scores", torch.float16),
    ], ids=str)  # fmt: skip
    def test_operands_in_units_of_float16_agree_with_the_twin(shape, recipe, dtype, monkeypatch):
        """GeForce cards get these operands, whose products they add up in float16. The interpreter adds in float32."""
        for module in ("forward", "backward"):
            monkeypatch.setattr(f"sagekernels.{module}.half_sums", lambda device: True)
        test_agrees_with_the_twin(shape, recipe, dtype)

    def test_units_of_float16_are_powers_of_two():
        v = torch.randn(2, 100, 3, 20)
        v[0, :, 1] *= 1e20
        v[1, :, 2] *= 1e-20
        v[1, :, 0] = 0
        v[0, 5, 2, 3], v[0, 6, 2, 3] = torch.nan, torch.inf
        halves, largest = in_half_units(v)
        finite = torch.where(v.isfinite(), v, 0.0).abs()
        assert torch.equal(largest, finite.amax((1, 3)))
        units = 2.0 ** (6 - largest.where(largest > 0, 32.0).frexp().exponent)
        expected = (v * units[:, None, :, None]).half()
        torch.testing.assert_close(halves, expected, rtol=0, atol=0, equal_nan=True)
        scaled = halves.float().abs().nan_to_num(0.0, posinf=0.0)
        assert (scaled <= 64).all() and (scaled.amax((1, 3))[finite.amax((1, 3)) > 0] >= 32).all()
        assert halves[0, 5, 2, 3].isnan() and halves[0, 6, 2, 3].isinf()

    @pytest.mark.parametrize("per_tile", [False, True])
    def test_quantizers(per_tile):
        x = torch.randn(2, 100, 3, 48).half().mT.contiguous().mT  # The input is strided.
        for mean in (None, token_mean(x)):
            ours = quantize_triton(x, mean=mean, per_tile=per_tile)
            twin = quantize_twin(x, mean=mean, per_tile=per_tile)
            assert torch.equal(ours.codes, twin.codes)
            torch.testing.assert_close(ours.scale, twin.scale)
            rows = torch.nn.functional.pad(twin.codes, (0, 0, 0, 28)).mT
            # The order is that of pieces.in_operand_order.
            in_order = rows.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)
            assert torch.equal(transpose_codes(twin.codes), in_order)

    def test_non_finite_values_reach_the_scales():
        x = torch.ones(1, 4, 1, 16)
        x[0, 1, 0, 3], x[0, 2, 0, 5] = float("nan"), float("inf")
        assert torch.isfinite(quantize_triton(x).scale).flatten().tolist() == [True, False, False, True]

    @pytest.mark.parametrize(
        "lengths", [[5], [5, 0, 125, 203, 0], [0, 0, 7, 0, 0], [1] * 300, [3] * 100, [999, 1] + [0] * 60]
    )
    def test_tokens_find_their_document(lengths):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        n = sum(lengths)
        for window in (None, 1, 7, n, 1 << 40):
            assert torch.equal(document_bounds_triton(cu_seqlens, n, window), document_bounds(cu_seqlens, n, window))

    @pytest.mark.parametrize(("shape", "recipe", "how"), [
        (Shape(2, 70, 90, 2, 1, 48, sinks=True), "scores", {}),
        (Shape(1, 100, 100, 2, 1, 32, documents=(20, 80), window=40, sinks=True), "fine", {}),
        (Shape(1, 70, 70, 2, 1, 32, sinks=True), "paper", {}),
        (Shape(1, 64, 64, 2, 2, 64, sinks=True), "scores", {"smooth_k": False}),
    ], ids=str)  # fmt: skip
    def test_sinks_agree_with_the_twin(shape, recipe, how):
        """Queries are strided. A sink of minus infinity changes no bit."""
        q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=2.0, dtype=torch.float16)
        sinks, q = random_sinks(shape), q.mT.contiguous().mT
        call = call_of(shape, q, k, v, recipe, sinks=sinks, **how)
        check(call, do)
        none = call._replace(sinks=None)
        for x, y in zip(*(triton_forward(none._replace(sinks=s)) for s in (None, sinks - torch.inf)), strict=True):
            assert torch.equal(x, y) if torch.is_tensor(x) else torch.equal(x.lse, y.lse)

    @pytest.mark.parametrize(("head_dim", "n"), [(64, 100), (128, 64)])
    def test_sinks_around_the_backward_of_hopper(head_dim, n):
        """The kernel before it writes the terms of the sinks, and the one behind adds them to dQ, times the mean."""
        shape = Shape(2, n, n, 2, 1, head_dim, sinks=True)
        q, k, v, do = random_inputs(shape, k_mean=2.0, dtype=torch.float16)
        call = call_of(shape, q, k, v, "scores", sinks=random_sinks(shape))
        o, saved = twin_forward(call)
        call, tiles, scale = call.backward(do, o, saved), -(-n // 64), head_dim**-0.5
        with_mean, _, _ = twin_backward(call)
        without, _, _ = twin_backward(call._replace(saved=saved._replace(k_mean=None)))
        terms = torch.full_like(saved.lse, math.nan)
        q16, vectors, sums = (torch.empty(size, dtype=dtype) for size, dtype in (
            (saved.q.codes.shape, torch.bfloat16), (4 * tiles * 64 * FLOATS[head_dim], torch.float32),
            ((4 * tiles, 64, head_dim), torch.float32),
        ))  # fmt: skip
        _prepare_queries_kernel[(4 * tiles,)](
            do, o, *saved.q, saved.lse, saved.sink_scores, q16, vectors, sums, None, terms, scale, 2, n, tiles,
            *do.stride()[:3], HEAD_DIM=head_dim, TILE=64, LOG2E=math.log2(math.e), FLOATS=FLOATS[head_dim],
        )  # fmt: skip
        torch.testing.assert_close(terms, call.sink_terms, rtol=1e-4, atol=1e-6)
        dq = torch.empty(do.shape, dtype=torch.float32)
        _finish_dq_kernel[(4 * tiles,)](sums, terms, saved.k_mean, dq, scale, 2, 2, n, tiles, HEAD_DIM=head_dim)
        torch.testing.assert_close(dq, with_mean.float() - without.float(), rtol=0, atol=2e-3 * with_mean.abs().max())

    def same_bits(found, expected):
        """Check that codes and scales of both orientations have the same bits. NaN equals NaN."""
        for ours, twin in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert ours.dtype == twin.dtype and ours.is_contiguous()
            if ours.dtype == torch.float32:
                torch.testing.assert_close(ours, twin, rtol=0, atol=0, equal_nan=True)
            else:
                assert torch.equal(ours.view(torch.uint8), twin.view(torch.uint8))

    # The dtype of what is read and the format do not meet in the kernel.
    @pytest.mark.parametrize(("number", "dtype"), [(INT8, torch.bfloat16), (E4M3, torch.float32)], ids=str)
    def test_casts_in_both_orientations(number, dtype):
        """Rows and columns have their own magnitudes, and some are zeros. There is more than one program each way, and
        there are strides. (The interpreter widens numbers that are subnormal in bfloat16 wrongly.)"""
        draw = torch.Generator().manual_seed(1)
        for rows, columns, magnitude in ((1, 1, 1.0), (16, 48, 1e30), (260, 130, 1.0), (37, 129, 1e-30)):
            spread = torch.exp2(6 * torch.randn(rows, 1, generator=draw) + 3 * torch.randn(columns, generator=draw))
            x = (torch.randn(rows, columns, generator=draw) * spread * magnitude).to(dtype)
            x[x.abs() < 2.0**-126] = 0 if dtype == torch.bfloat16 else 1e-40
            x[rows // 2 :: 40], x[:, columns // 3 :: 50] = 0, 0
            same_bits(quantize_both_triton(x, number), quantize_both_twin(x, number))
        wide = torch.empty(rows, 2 * columns, dtype=dtype).fill_(torch.nan)
        wide[:, :columns] = x
        for strided in (wide[:, :columns], x.t().contiguous().t(), x[:1].expand(8, -1)):
            same_bits(quantize_both_triton(strided, number), quantize_both_twin(strided, number))

    def test_offsets_reach_past_2_to_31(monkeypatch):
        """Rows lie far apart, in memory that nobody touches and that therefore takes no space."""
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        memory, step = torch.empty(2**31 + 2**10, dtype=torch.float16), 2**30 + 2**8

        def far(x, place):
            return memory.view(x.dtype).as_strided(x.shape, (step, 1), place).copy_(x)

        x = far(torch.randn(3, 48).bfloat16(), 0)
        same_bits(quantize_both_triton(x, INT8), quantize_both_twin(x, INT8))
        inputs = random_swiglu(3, 20, 1.0, torch.float16)
        expected = *swiglu_gradients_triton(*inputs), *swiglu_triton(*inputs[1:])
        apart = [far(part, 64 * place) for place, part in enumerate(inputs)]
        found = *swiglu_gradients_triton(*apart), *swiglu_triton(*apart[1:])
        assert all(map(torch.equal, found, expected))
        x = random_qk(
            3, (2, 1), 16, 1.0, torch.float16
        )  # Gradients go by a loop, which the interpreter counts in int32.
        apart = x._replace(q=far(x.q, 0), k=far(x.k, 64))
        assert all(map(torch.equal, qk_norm_rope_triton(*apart[3:]), qk_norm_rope_triton(*x[3:])))

    def test_casts_round_as_torch_does():
        """The values are all of e4m3, the middles between neighbours, and their neighbours. The largest magnitudes
        lie around those at which the scale changes."""
        values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
        values = values[values.isfinite()].unique()
        middles = (values[1:] + values[:-1]) / 2
        infinity = torch.tensor(torch.inf)
        line = torch.cat([values, middles, middles.nextafter(infinity), middles.nextafter(-infinity)])
        x = torch.stack([line * 2.0**k for k in (-20, 0, 3)])
        same_bits(quantize_both_triton(x, E4M3), quantize_both_twin(x, E4M3))
        edges = torch.tensor([1.75 * 2.0**k for k in range(-120, 126, 7)])
        edges = torch.cat([edges, edges.nextafter(infinity), edges.nextafter(-infinity)])[:, None]
        same_bits(quantize_both_triton(edges, E4M3), quantize_both_twin(edges, E4M3))

    @pytest.mark.parametrize("number", NUMBERS, ids=str)
    def test_casts_of_what_is_not_finite(number):
        """The scales are the twin's. Codes under a scale that is NaN may be any."""
        x = torch.randn(40, 50)
        x[3, 4], x[7, 9], x[8, 9] = torch.nan, torch.inf, -torch.inf
        found, expected = quantize_both_triton(x, number), quantize_both_twin(x, number)
        for ours, twin in zip(found, expected, strict=True):
            assert torch.equal(ours.scale.isnan(), twin.scale.isnan())
            assert ours.scale.isnan().sum() == (3 if twin is expected[0] else 2)
            kept = ~twin.scale.isnan().squeeze(1)
            assert torch.equal(ours.codes.view(torch.uint8)[kept], twin.codes.view(torch.uint8)[kept])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_swiglu_and_its_gradients(dtype, monkeypatch):
        """There is more than one program each way, sizes fill no tile, and there are strides. The largest magnitudes
        are those of what was written, and a cast with them has the bits of one without."""
        monkeypatch.setattr(sys.modules["sagekernels.swiglu"], "TILE", 16)  # The package has a function of this name.
        for rows, columns, magnitude in ((1, 1, 1.0), (20, 300, 1e-2), (9, 257, 20.0), (37, 129, 1.0)):
            inputs = random_swiglu(rows, columns, magnitude, dtype)
            torch.full((rows, 2 * columns), torch.nan, dtype=dtype)  # Results may come to lie in this memory.
            (found, largest), (y, of_y) = swiglu_gradients_triton(*inputs), swiglu_triton(*inputs[1:])
            assert found.shape == (rows, 2 * columns) and found.dtype == dtype and found.is_contiguous()
            gate, up = (x.double() for x in inputs[1:])
            exact = torch.nn.functional.silu(gate) * up
            least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            if dtype != torch.bfloat16:  # The interpreter truncates to it.
                assert swiglu_gradients_error(found, *inputs) <= 1
                assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * 4 * exact.abs() + least).all()
            for x, known in ((found, largest), (y, of_y)):
                assert torch.equal(known, largest_twin(x))
                same_bits(quantize_both_triton(x, INT8, known), quantize_both_twin(x, INT8))
        apart = [x.t().contiguous().t() for x in inputs]
        assert torch.equal(swiglu_gradients_triton(*apart)[0], found)
        everywhere = inputs[0][:1, :1].expand(rows, columns)  # The gradient of a sum looks like this.
        expected = swiglu_gradients_triton(everywhere.contiguous(), *inputs[1:])
        assert all(map(torch.equal, swiglu_gradients_triton(everywhere, *inputs[1:]), expected))

    def test_swiglu_of_what_is_not_finite():
        """A scale is NaN where a value of its row or column is not finite."""
        grad, gate, up = (x.clone() for x in random_swiglu(20, 40, 1.0, torch.float32))
        up[3, 4], up[5, 6], gate[7, 8] = torch.nan, torch.inf, torch.nan
        for x, largest in (swiglu_triton(gate, up), swiglu_gradients_triton(grad, gate, up)):
            for known, found in zip(quantize_both_triton(x, INT8, largest), quantize_both_twin(x, INT8), strict=True):
                assert torch.equal(known.scale.isnan(), found.scale.isnan()) and known.scale.isnan().any()

    def check_add_norm(dtype):
        """There is more than one program, with rows left over, and columns that are no power of 2."""
        magnitudes = (1.0, 1e-2, 0.1) if dtype == torch.float16 else (1.0, 1e-15, 1e15)
        for (rows, columns), magnitude in zip(((1, 1), (5, 129), (19, 40)), magnitudes, strict=True):
            inputs = random_norm(rows, columns, magnitude, dtype)
            wide = [part.repeat(1, 2 + place)[:, :columns] for place, part in enumerate(inputs[:4])]
            for x, y, of_stream, of_normed in (inputs[:4], wide, [part.t().contiguous().t() for part in inputs[:4]]):
                made = add_norm.add_norm_triton(x, y, inputs[4], 1e-6)
                gradients = add_norm.add_norm_gradients_triton(of_stream, of_normed, made[0], inputs[4], 1e-6)
                assert all(part.is_contiguous() and part.dtype == dtype for part in (*made[:2], *gradients[:2]))
                # The interpreter truncates to bfloat16.
                errors = add_norm_errors(inputs, 1e-6, made, gradients)
                assert max(errors) <= (2 if dtype == torch.bfloat16 else 1), errors
                for part, largest in (made[1:], gradients[::2]):
                    assert torch.equal(largest, largest_twin(part))
                    same_bits(quantize_both_triton(part, INT8, largest), quantize_both_twin(part, INT8))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_addition_and_norm(dtype):
        check_add_norm(dtype)

    def test_mistakes_in_addition_and_norm_are_found(monkeypatch):
        find(monkeypatch, lambda: check_add_norm(torch.float32), add_norm, [
            ("add_norm_kernel", "bits = magnitudes(normed, NARROW)", "bits = magnitudes(stream, NARROW)"),
            ("add_norm_kernel", "tl.maximum(of_columns, bits)", "bits"),
            ("add_norm_kernel", "row * y_stride", "row * x_stride"),
            ("add_norm_kernel", "tl.minimum(TILE, rows - first)", "tl.minimum(TILE - 1, rows - first)"),
            ("add_norm_gradients_kernel", "of_gain += ", "of_gain = "),
            ("add_norm_gradients_kernel", "of_columns = tl.maximum(of_columns, bits)", "of_columns = bits"),
            ("add_norm_gradients_kernel", "(beside + ", "("),
            ("add_norm_gradients_kernel", "grad *= gain", "grad *= 1.0"),
        ])  # fmt: skip

    def test_addition_and_norm_of_what_is_not_finite():
        """A scale is NaN where a value of its row or column is not finite. Without eps a row of zeros is not."""
        x, y, of_stream, of_normed, gain = random_norm(9, 40, 1.0, torch.float32)
        of_stream[3, 4], of_normed[5, 6], x[2, 7] = torch.inf, torch.nan, torch.nan
        for eps in (0.0, 1e-6):
            made, twin = (f(x, y, gain, eps) for f in (add_norm.add_norm_triton, add_norm.add_norm_twin))
            back = add_norm.add_norm_gradients_triton, add_norm.add_norm_gradients_twin
            gradients, of_twin = (f(of_stream, of_normed, twin[0], gain, eps) for f in back)
            for (part, largest), expected in ((made[1:], twin[1]), (gradients[::2], of_twin[0])):
                assert torch.equal(part.isfinite(), expected.isfinite()) and not part.isfinite().all()
                for known, found in zip(
                    quantize_both_triton(part, INT8, largest), quantize_both_twin(part, INT8), strict=True
                ):
                    assert torch.equal(known.scale.isnan(), found.scale.isnan())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(("tokens", "heads", "head_dim", "magnitude"), [
        (1, (1, 1), 2, 1.0), (3, (20, 4), 128, 1e4), (17, (5, 1), 80, 1e-3),
    ])  # fmt: skip
    def test_qk_norm_and_rotary_embedding(tokens, heads, head_dim, magnitude, dtype):
        """There are more heads than a program has in hand, programs with fewer tokens than others, and halves that are
        no power of 2. (The interpreter truncates to bfloat16: up to two roundings.)"""
        x = random_qk(tokens, heads, head_dim, magnitude, dtype)
        y, gradients = qk_norm_rope_triton(*x[3:]), qk_norm_rope_gradients_triton(*x)
        assert all(part.is_contiguous() and part.dtype == dtype for part in (*y, *gradients))
        assert max(qk_norm_rope_errors(y, gradients, x)) <= (2 if dtype == torch.bfloat16 else 1)

    def test_qk_norm_and_rotary_embedding_of_any_strides():
        x = random_qk(5, (3, 1), 16, 1.0, torch.float32)
        y, gradients = qk_norm_rope_triton(*x[3:]), qk_norm_rope_gradients_triton(*x)
        by_heads = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in x[:3]]
        turned = [part.t().contiguous().t() for part in x[3:5]]
        assert all(map(torch.equal, qk_norm_rope_triton(*turned, *x[5:]), y))
        for inputs in ([*by_heads, *x[3:5]], [*x[:3], *turned]):
            assert all(map(torch.equal, qk_norm_rope_gradients_triton(*inputs, *x[5:]), gradients))
        everywhere = x.of_q[:1, :1, :1].expand_as(x.of_q)  # The gradient of a sum looks like this.
        gradients = qk_norm_rope_gradients_triton(everywhere, *x[1:])
        assert max(qk_norm_rope_errors(y, gradients, x._replace(of_q=everywhere))) <= 1

    def test_gains_are_summed_over_all_programs(monkeypatch):
        """There are 17 tokens, with few at a time: several tiles of partial sums, and a rest of one token, of one
        row."""
        module = sys.modules["sagekernels.qk_norm_rope"]  # The package has a function of this name.
        monkeypatch.setattr(module, "BACKWARD_TOKENS", 2)
        monkeypatch.setattr(module, "SUM_ROWS", 4)
        x = random_qk(17, (2, 1), 16, 1.0, torch.float32)
        gradients = qk_norm_rope_gradients_triton(*x)
        assert max(qk_norm_rope_errors(qk_norm_rope_triton(*x[3:]), gradients, x)) <= 1

    def test_heads_that_are_not_finite_stay_so_alone():
        x = random_qk(20, (4, 2), 16, 1.0, torch.float32)
        x.q[3, 4], x.q[5, 40], x.k[7, 20] = torch.nan, torch.inf, -torch.inf
        x.of_k[9, 1, 3] = torch.nan
        found = *qk_norm_rope_triton(*x[3:]), *qk_norm_rope_gradients_triton(*x)
        expected = *qk_norm_rope_twin(*x[3:]), *qk_norm_rope_gradients_twin(*x)
        for ours, twin in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, twin, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert expected[2].isnan().any(1).sum() == 4 and not expected[2].isnan().all(1).any()

    def test_no_tokens_are_no_trouble():
        x = random_qk(1, (2, 1), 16, 1.0, torch.float32)
        nothing = x._make([*(part[:0] for part in x[:5]), *x[5:7], *(part[:0] for part in x[7:9]), x.eps])
        assert [len(y) for y in qk_norm_rope_triton(*nothing[3:])] == [0, 0]
        of_qkv, of_gains = qk_norm_rope_gradients_triton(*nothing)
        assert of_qkv.shape == (0, 64) and torch.equal(of_gains, torch.zeros(2, 16))

    @pytest.mark.parametrize(("batch", "tokens", "heads", "head_dim", "dtype"), [
        (2, 70, (3, 1), 64, torch.float16), (1, 33, (4, 2), 128, torch.float32), (3, 1, (1, 1), 128, torch.bfloat16),
    ])  # fmt: skip
    def test_the_gradient_of_a_projection_from_sums_of_dq(batch, tokens, heads, head_dim, dtype):
        """Sums lie in tiles of 64 tokens, with zeros behind the last token. dV is there already, and the columns of q
        hold poison."""
        x, scale = random_qk(batch * tokens, heads, head_dim, 1.0, dtype), head_dim**-0.5
        x = x._replace(of_q=torch.randn(batch * tokens, heads[0], head_dim))
        tiles = -(-tokens // 64)
        dq = torch.zeros(batch, heads[0], 64 * tiles, head_dim)
        dq[:, :, :tokens] = x.of_q.view(batch, tokens, heads[0], head_dim).transpose(1, 2) / scale
        parts = dq.view(batch, heads[0], tiles, 4, 2, 8, head_dim // 64, 8, 4, 2)
        sums = parts.permute(0, 1, 2, 6, 3, 7, 5, 8, 4, 9).contiguous()
        narrowed = torch.empty(batch, tokens, heads[0], head_dim)
        _finish_dq_kernel[(batch * heads[0] * tiles,)](
            sums, None, None, narrowed, scale, heads[0], 1, tokens, tiles, HEAD_DIM=head_dim
        )
        torch.testing.assert_close(narrowed.flatten(0, 1), x.of_q)

        out = torch.full((batch, tokens, heads[0] + 2 * heads[1], head_dim), torch.nan, dtype=dtype)
        _, of_k, of_v = out.flatten(0, 1).split([heads[0], heads[1], heads[1]], 1)
        of_k.copy_(x.of_k)
        of_v.copy_(x.of_v)
        of_gains = finish_projection(sums, out, scale, Projection(*x[3:]))
        errors = qk_norm_rope_errors(qk_norm_rope_triton(*x[3:]), (out.view(batch * tokens, -1), of_gains), x)
        assert max(errors) <= (2 if dtype == torch.bfloat16 else 1)
