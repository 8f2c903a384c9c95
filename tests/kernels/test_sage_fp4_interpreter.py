"""FP4's Triton kernels in Triton's interpreter: quantizers equal the twin's bit for bit, attention up to float sums.

test_sage_interpreter.py starts the process that interprets.
"""

import pytest
import torch

from interpreted import INSIDE, poisoned_memory  # noqa: F401

if INSIDE:
    from sagekernels import fp4_attention
    from sagekernels.fp4.kernels import decoded, quantize_fp4_triton
    from sagekernels.fp4.quantize import FORMATS, head_unit, quantize_fp4
    from sagekernels.testing import Shape, random_inputs, rel_l2

    SHAPES = [
        Shape(1, 128, 128, 2, 1, 64),
        Shape(2, 70, 70, 4, 2, 16),
        Shape(1, 65, 130, 1, 1, 80, causal=False),
        Shape(1, 33, 161, 3, 1, 32),
        Shape(1, 1, 77, 2, 2, 128),
        Shape(1, 200, 200, 2, 1, 32, documents=(5, 0, 70, 1, 124, 0)),
        Shape(1, 133, 133, 1, 1, 24, causal=False, documents=(40, 93)),
    ]

    def all_sizes() -> torch.Tensor:
        """Return [2, 130, 90] with groups of every possible size relative to the head's largest one. Some groups have
        numbers at midpoints, and some are zeros."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(2, 130, 90, generator=draw)
        x *= torch.rand(2, 130, 90, generator=draw).mul(20).sub(20).exp2()
        x[0, :100] = x[0, :100].half().float() * torch.arange(100)[:, None].sub(90).exp2()
        x[1, 5:9], x[1, 40, 16:32] = 0.0, -0.0
        steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        x[1, 50:120, :8] = steps * torch.arange(70)[:, None].sub(60).exp2()
        return x

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("size", [1.0, 2.0**-130, 2.0**-60, 2.0**90])
    def test_quantizers_are_the_twins(format, size):
        x = all_sizes() * size
        unit = torch.ones(2, 1, 1) if FORMATS[format].e8m0 else head_unit(x)
        ours = decoded(*quantize_fp4_triton(x, unit, 128, format=format), 90, format=format, unit=unit)
        twin = quantize_fp4(x, format=format, unit=unit)
        assert torch.equal(ours.codes, twin.codes)
        assert torch.equal(ours.scale, twin.scale)
        assert len(twin.scale.unique()) > 60 or size < 2.0**-100

    @pytest.mark.parametrize("format", FORMATS)
    def test_what_is_not_finite_is_nan(format):
        x = torch.ones(1, 3, 64)
        x[0, 0, 3], x[0, 1, 40] = float("nan"), -float("inf")
        ours = decoded(*quantize_fp4_triton(x, torch.ones(1, 1, 1), 64, format=format), 64, format=format)
        twin = quantize_fp4(x, format=format)
        torch.testing.assert_close(ours.scale, twin.scale, equal_nan=True, rtol=0, atol=0)
        assert ours.scale.isnan().sum() == 2

    def check(shape, *, dtype=torch.float16, sizes=(1.0, 1.0, 1.0), limit=2e-3, **options):
        q, k, v, _ = random_inputs(shape, sigma=1.5, k_mean=1.0, dtype=torch.float32)
        q, k, v = (((x * size).to(dtype)) for x, size in zip((q, k, v), sizes, strict=True))
        how = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens(), **options}
        ours, twin = (fp4_attention(q, k, v, **how, backend=name) for name in ("triton", "twin"))
        assert ours.dtype == dtype and ours.isfinite().all()
        assert rel_l2(ours, twin) < limit

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_attention_is_the_twins(shape):
        """The results are equal, except that the order of float sums may push a P at a midpoint to either code."""
        check(shape)

    @pytest.mark.parametrize("options", [
        {"format": "mxfp4", "scale": 0.3}, {"smooth_q": False}, {"smooth_k": False},
    ], ids=str)  # fmt: skip
    def test_options(options):
        check(Shape(1, 100, 130, 2, 1, 48), **options)

    @pytest.mark.parametrize("sizes", [(1e-3, 1e3, 1e-4), (1e-20, 1e20, 1e-30), (1e15, 1e-15, 1e25)])
    def test_tiny_and_huge_inputs(sizes):
        # The interpreter truncates here when it writes.
        check(Shape(1, 70, 70, 2, 1, 32), dtype=torch.bfloat16, sizes=sizes, limit=6e-3)

    @pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
    def test_programs_of_two_tiles(shape, monkeypatch):
        """Data center Blackwell has such programs. Each tile has its own mean of Q."""
        monkeypatch.setattr("sagekernels.fp4.kernels.products", lambda device: (False, 128))
        check(shape)

    @pytest.mark.parametrize("backend", ["triton", "twin"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_not_finite_reaches_its_channel_alone(backend, bad):
        q, k, v, _ = random_inputs(Shape(1, 200, 200, 1, 1, 32), dtype=torch.float16)
        v[0, 150, 0, 3] = 0.0
        clean = fp4_attention(q, k, v, backend=backend)
        v[0, 150, 0, 3] = bad
        o = fp4_attention(q, k, v, backend=backend)
        assert o[0, 150:, 0, 3].isnan().all()
        o[..., 3] = clean[..., 3]
        assert torch.equal(o, clean)
