"""FP4 attention's kernels on a real GPU agree with the twin: `make test-gpu`."""

import pytest
import torch

from sagekernels import fp4_attention
from sagekernels.fp4.kernels import decoded, quantize_fp4_triton
from sagekernels.fp4.quantize import FORMATS, head_unit, quantize_fp4
from sagekernels.testing import Shape, cosine, exact_results, random_inputs, rel_l2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [
    Shape(2, 1024, 1024, 4, 2, 64),
    Shape(1, 1000, 1000, 4, 4, 128, causal=False),
    Shape(1, 333, 333, 3, 1, 80),
    Shape(1, 321, 321, 2, 2, 256),
    Shape(1, 130, 130, 2, 2, 16),
    Shape(1, 100, 1000, 2, 1, 64),
    Shape(1, 1, 333, 2, 2, 128),
    Shape(1, 2000, 2000, 2, 1, 64, documents=(1, 0, 63, 64, 65, 700, 1, 1, 1105, 0, 0)),
    Shape(1, 2000, 2000, 2, 2, 128, causal=False, documents=(500, 1, 499, 1000, 0, 0)),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # This setting fills torch.empty with NaN and largest integers.
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1.0, 2.0**-130, 2.0**90])
def test_quantizers_are_the_twins(format, size):
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, 500, 1000, generator=draw, device="cuda")
    x *= torch.rand(3, 500, 1000, generator=draw, device="cuda").mul(20).sub(20).exp2() * size
    unit = torch.ones(3, 1, 1, device="cuda") if FORMATS[format].e8m0 else head_unit(x)
    ours = decoded(*quantize_fp4_triton(x, unit, 1024, format=format), 1000, format=format, unit=unit)
    twin = quantize_fp4(x, format=format, unit=unit)
    assert torch.equal(ours.codes, twin.codes) and torch.equal(ours.scale, twin.scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_twins(shape, dtype, format):
    q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, dtype=dtype, device="cuda")
    how = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens("cuda")}
    ours, twin = (fp4_attention(q, k, v, **how, format=format, backend=name) for name in ("triton", "twin"))
    assert torch.equal(ours, fp4_attention(q, k, v, **how, format=format)), "it is what a GPU takes"
    assert ours.isfinite().all() and rel_l2(ours, twin) < 6e-3
    assert cosine(ours, exact_results(q, k, v, do, **how).o) > 0.94
