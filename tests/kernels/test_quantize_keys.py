"""quantize_keys.cu on a machine without a GPU agrees with quantize.quantize_twin: the emulator runs it."""

import functools
import math

import pytest
import torch

from emulator import Emulated
from sagekernels import nvrtc
from sagekernels.quantize import quantize_twin, token_mean
from sagekernels.quantize_keys import chunks_of

SOURCE = "quantize_keys.cu"
MISTAKES = [
    {"wait_count(counters + 1 + head, chunks);": ""},
    {"wait_count(counters + 1 + head, chunks);": "wait_count(counters + 1 + head, chunks + 1);"},
    {"add_release(counters + 1 + head, 1);": "add_release(counters + 1, 1);"},
    {"column & half ? largest[i] : largest[i + half]": "largest[i]"},
    {"token < padded": "token < tokens"},
    {"(long long)head * D + threadIdx.x": "threadIdx.x"},
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """(head_dim, smooth, half, pairs) -> the kernel."""
    folder = tmp_path_factory.mktemp("quantize")
    return functools.cache(lambda *key: Emulated(folder, SOURCE, "quantize", defines(*key), MISTAKES))


def defines(head_dim, smooth, half, pairs=False):
    return {"HEAD_DIM": head_dim, "SMOOTH": int(smooth), "FP16": int(half), "PAIRS": int(pairs)}


def quantized(kernels, k, smooth, processors, pairs=False, **options):
    """Return codes, scales, scales in order [heads, padded] and means of k [B, N, heads, D], whose strides are
    multiples of 8."""
    batch, n, heads, head_dim = k.shape
    padded = -(-n // 96) * 96
    chunks, per_chunk = chunks_of(padded, head_dim, processors)
    codes = torch.full((batch, heads, n, head_dim), 77, dtype=torch.int8)
    scale = torch.full((batch, heads, n), math.nan)
    ordered = torch.full((batch * heads, padded * (1 + pairs)), math.nan)
    sums = torch.full((batch * heads * chunks, head_dim), math.nan)
    means = torch.full((batch, heads, 1, head_dim), math.nan) if smooth else None
    counters = torch.zeros(1 + batch * heads, dtype=torch.int32)
    wrong = kernels(head_dim, smooth, k.dtype == torch.float16, pairs)(
        batch * heads * chunks, 512, k, codes, scale, ordered, means, sums, counters, heads, n, padded,
        chunks, per_chunk, *(s // 8 for s in k.stride()[:3]), **{"resident": max(1, processors // 2)} | options,
    )  # fmt: skip
    assert not wrong, wrong
    return codes, scale, ordered, torch.zeros(0) if means is None else means


def in_order(scale, padded):
    position = [16 * (t // 16) + 4 * (t % 8 // 2) + 2 * (t % 16 // 8) + t % 2 for t in range(scale.shape[2])]
    ordered = torch.zeros(scale.shape[0] * scale.shape[1], padded)
    ordered[:, position] = scale.flatten(0, 1)
    return ordered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("batch", "n", "heads", "head_dim", "processors"),
    [(1, 1, 1, 64, 2), (2, 77, 3, 128, 4), (1, 300, 1, 128, 132), (2, 1100, 2, 64, 6), (1, 2000, 1, 128, 6)],
)
@pytest.mark.parametrize("smooth", [True, False])
def test_agrees_with_the_twin(kernels, batch, n, heads, head_dim, processors, smooth, dtype):
    k = (torch.randn(batch, n, 3, heads, head_dim, generator=torch.Generator().manual_seed(n)) + 1).to(dtype)
    k = k.unbind(2)[1]  # The keys are strided.
    k[0, n // 2, 0] = 0
    codes, scale, ordered, means = found = quantized(kernels, k, smooth, processors)
    twin = quantize_twin(k, mean=token_mean(k) if smooth else None)
    torch.testing.assert_close(means, token_mean(k) if smooth else torch.zeros(0))
    assert torch.allclose(scale, twin.scale, rtol=1e-5 if smooth else 0, atol=0)
    assert (codes.int() - twin.codes.int()).abs().max() <= smooth and (codes != twin.codes).float().mean() < 1e-3
    assert torch.equal(ordered, in_order(scale, ordered.shape[1]))
    assert all(torch.equal(x, y) for x, y in zip(quantized(kernels, k, smooth, processors, seed=1), found, strict=True))


def test_scales_with_what_takes_the_magic_constant_back(kernels):
    """-MAGIC times the scale is exact in float32, so (MAGIC + x) scale - MAGIC scale is x scale, for all codes."""
    k = torch.randn(2, 300, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, scale, ordered, _ = quantized(kernels, k, True, 6, pairs=True)
    cut, back = ordered.view(4, -1, 2).unbind(-1)
    assert torch.allclose(cut[:, :300], scale.flatten(0, 1), rtol=2**-21, atol=0) and not ordered[:, 600:].any()
    assert torch.equal(back.double(), -12582912.0 * cut.double())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("smooth", [True, False])
def test_non_finite_values_propagate(kernels, bad, smooth):
    """A value that is not finite reaches the scale of its token and, through the mean, the tokens of its head."""
    k = torch.randn(1, 600, 2, 128).bfloat16()
    k[0, 20, 1, 5] = bad
    codes, scale, _, _ = quantized(kernels, k, smooth, 6)
    twin = quantize_twin(k, mean=token_mean(k) if smooth else None)
    assert torch.equal(scale.isfinite(), twin.scale.isfinite())
    assert scale[0, 0].isfinite().all() and scale[0, 1].isfinite().sum() == (0 if smooth else 599)
    assert not codes[~scale.isfinite()].any()


def test_more_chunks_than_fit_are_found(kernels):
    with pytest.raises(AssertionError, match="deadlock"):
        quantized(kernels, torch.zeros(1, 2000, 1, 128).bfloat16(), True, 132, resident=3)


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_found(kernels, mistake):
    """A message or other bits than without it show each mistake."""
    k = torch.randn(1, 700, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = quantized(kernels, k, True, 6)
    try:
        found = quantized(kernels, k, True, 6, mistake=mistake)
    except AssertionError:
        return
    assert not all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("tokens", [1, 96, 16384, 33000, 1 << 20])
@pytest.mark.parametrize("processors", [1, 16, 132])
def test_chunks_of_a_head_fit_the_gpu(tokens, processors):
    for head_dim in (64, 128):
        chunks, per_chunk = chunks_of(tokens, head_dim, processors)
        assert (chunks - 1) * per_chunk < tokens <= chunks * per_chunk and chunks <= max(1, processors // 2)


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
def test_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    assert all(nvrtc.compiled(SOURCE, defines(*key), "sm_90a") for key in ((64, True, True), (128, False, False)))
