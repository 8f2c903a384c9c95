"""The forward by mma.sync on a machine without a GPU: the emulator runs mma_forward.cu, and it compiles for its
GPUs."""

import functools
import math

import pytest
import torch

from emulated_forward import (
    WINDOWS,
    assert_bounds_are_kept,
    assert_close,
    assert_non_finite_values_propagate,
    assert_scores_may_outgrow_the_maximum,
    assert_sinks_are_another_score,
    inputs,
)
from emulator import Emulated, wrong_results
from sagekernels import nvrtc
from sagekernels.call import Call
from sagekernels.mma import CAPABILITIES, QUERIES, forward_defines
from sagekernels.quantize import TILE
from sagekernels.reference import attention_reference, twin_forward
from sagekernels.testing import Shape, random_inputs, rel_l2
from sass import disassembled

SOURCE = "mma_forward.cu"
MISTAKES = [
    {"copies_wait<0>();\n        __syncthreads();": "__syncthreads();"},
    {"copies_wait<0>();\n        __syncthreads();": "copies_wait<0>();"},
    {"load(tile - 1, stage ^ 1);": "load(tile - 1, stage);"},
    {"load(tile - 1, stage ^ 1);": "load(tile, stage ^ 1);"},
    {"key + i * V_ROWS + v_row < n_k": "true"},
    {"at >= low && at < high": "at >= low && at <= high"},
    {"at >= low && at < high": "at > low && at < high"},
    {"tile < own.clear || tile >= own.blurred": "tile < own.clear || tile > own.blurred"},
    {"tile < own.clear || tile >= own.blurred": "tile + 1 < own.clear || tile >= own.blurred"},
    {"tile >= own.last || tile < own.first": "tile >= own.last - 1 || tile < own.first"},
    {"tile >= own.last || tile < own.first": "tile >= own.last || tile <= own.first"},
    {"tiles_of(first_query + 32 * warp, first_query + 32 * warp + 31)": "tiles_of(first_query, first_query + 31)"},
    {"sum[i][r] *= shrink;": ";"},
    {"out[i][n][2 * r] *= shrink, out[i][n][2 * r + 1] *= shrink;": ";"},
    {"!(row[0][0] + row[0][1] + row[1][0] + row[1][1] <= LIMIT)": "false"},
    {"p16[i][j / 2][2 * (j % 2) + r]": "p16[i][j / 2][2 * r + j % 2]"},
    {"k ? s[i][j] : magic": "magic"},
    {"a[i][k / 2][2 * (k % 2) + r]": "a[i][k / 2][2 * r + k % 2]"},
    {"place<D>(lane % 8, lane / 8)": "lane % 8 * D + lane / 8 * 16"},
    {"place<2 * D>(lane % 16, lane / 16)": "lane % 16 * 2 * D + lane / 16 * 16"},
    {"CAUSAL ? blocks - 1 - rest : rest": "0"},
    {"head / group": "0"},
    {"least(seen, ends[to])": "least(seen, ends[from])"},
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """(head_dim, causal, packed, half, half_sums, sinks) -> the kernel, which can make MISTAKES."""
    folder = tmp_path_factory.mktemp("forward")
    return functools.cache(lambda *key: Emulated(folder, SOURCE, "forward", forward_defines(*key), MISTAKES))


def tile_units(v):
    """Return v [B, N, heads, D] in float16, each tile of 64 tokens of a head in units of a power of two, and the
    units."""
    n = v.shape[1]
    tiles = torch.nn.functional.pad(v.float(), (0, 0, 0, 0, 0, -n % TILE)).unflatten(1, (-1, TILE))
    largest = tiles.abs().amax((2, 4))  # [B, tiles, heads]
    units = torch.where(largest > 0, torch.exp2(torch.frexp(largest).exponent - 4.0), 1.0)
    narrow = (tiles / units[:, :, None, :, None]).half().flatten(1, 2)[:, :n].contiguous()
    return narrow, units.transpose(1, 2).contiguous()


def emulated(
    kernels, q, k, v, causal, *, bounds=None, smooth=True, scale=0.125, half_sums=False, sinks=None, **options
):
    """Return o, lse and Q's codes of the kernel, which gets the twin's codes of K, and the twin's o, lse and codes."""
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    o_twin, saved = twin_forward(Call(q, k, v, bounds, causal, scale, smooth, "fine", None, sinks))
    padded = -(-n_k // TILE) * TILE
    cut = torch.nn.functional.pad(
        (saved.k.scale.contiguous().view(torch.int32) & -4).view(torch.float32), (0, padded - n_k)
    )
    pairs = torch.stack((cut, -12582912.0 * cut), -1).contiguous()
    spare = torch.full((saved.k.codes.numel() + 64 * head_dim,), 99, dtype=torch.int8)
    spare[: saved.k.codes.numel()] = saved.k.codes.flatten()
    o, lse = torch.full_like(o_twin, math.nan), torch.full_like(saved.lse, math.nan)
    codes, scales = torch.full_like(saved.q.codes, 77), torch.full_like(saved.q.scale, math.nan)
    starts, ends = (None, None) if bounds is None else bounds
    blocks = -(-n_q // QUERIES)
    values, units = tile_units(v) if half_sums else (v, None)
    kernel = kernels(head_dim, causal, bounds is not None, q.dtype == torch.float16, half_sums, sinks is not None)
    wrong = kernel(
        blocks * batch * heads, 128, q, spare, pairs, values, units, starts, ends, saved.sink_scores,
        codes, scales, o, lse,
        scale * math.log2(math.e), heads, heads // kv_heads, n_q, n_k, padded, blocks,
        *q.stride()[:3], *values.stride()[:3], **options,
    )  # fmt: skip
    assert not wrong, wrong
    assert torch.equal(codes, saved.q.codes)
    assert torch.equal(scales, saved.q.scale) or scales.isnan().any()
    return o.float(), lse, o_twin.float(), saved.lse


@pytest.mark.parametrize(("shape", "dtype", "half_sums"), [
    (Shape(1, 300, 300, 2, 1, 64, True), torch.bfloat16, False),
    (Shape(2, 130, 70, 2, 2, 64, False), torch.float16, True),
    (Shape(1, 130, 333, 3, 1, 128, True), torch.bfloat16, True),
    (Shape(1, 257, 256, 1, 1, 128, False), torch.float16, False),
    (Shape(1, 1, 257, 1, 1, 128, True), torch.bfloat16, False),
    (Shape(2, 64, 64, 1, 1, 64, True), torch.bfloat16, False),
], ids=str)  # fmt: skip
def test_shapes(kernels, shape, dtype, half_sums):
    q, k, v, _ = random_inputs(shape, k_mean=1.0, dtype=dtype)
    assert_close(*emulated(kernels, q, k, v, shape.causal, half_sums=half_sums))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [(1, 0, 63, 64, 100, 1, 71), (1,) * 130, (129, 90), (5, 195)])
def test_documents(kernels, documents, causal):
    assert_bounds_are_kept(functools.partial(emulated, kernels), documents, None, causal)


@WINDOWS
def test_windows(kernels, documents, window, causal):
    assert_bounds_are_kept(functools.partial(emulated, kernels), documents, window, causal)


@pytest.mark.parametrize(("head_dim", "half_sums"), [(64, False), (128, True)])
def test_scores_that_outgrow_the_old_maximum(kernels, head_dim, half_sums):
    ours = functools.partial(emulated, kernels, half_sums=half_sums)
    assert_scores_may_outgrow_the_maximum(ours, head_dim, 300)


@pytest.mark.parametrize("half_sums", [False, True])
def test_error_against_float64_is_the_twins(kernels, half_sums):
    """The inputs include a mean of V that is three times its spread, and channels of V of very different size."""
    q, k, v = inputs(3, [(1, 300, 1, 128)] * 3)
    v = ((v.float() + 3) * torch.logspace(-3, 3, 128)).bfloat16()
    o, _, o_twin, _ = emulated(kernels, q, k, v, True, scale=128**-0.5, half_sums=half_sums)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=True)
    channel = slice(None, None, 31)
    for ours, twin, judge in ((o, o_twin, exact), (o[..., channel], o_twin[..., channel], exact[..., channel])):
        assert rel_l2(ours, judge) < 1.05 * rel_l2(twin, judge) + 1e-4


def test_strides_and_slices(kernels):
    packed = torch.randn(2, 100, 3, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_close(*emulated(kernels, *packed.unbind(2), True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks(kernels, head_dim):
    assert_sinks_are_another_score(functools.partial(emulated, kernels, half_sums=head_dim == 128), head_dim)


def test_non_finite_values_propagate_and_zeros_do_not(kernels):
    assert_non_finite_values_propagate(functools.partial(emulated, kernels))


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_found(kernels, mistake):
    assert wrong_results(mistaken, kernels, mistake, seeds=2)


def mistaken(kernels, case, **options):
    if case == "documents":
        q, k, v = inputs(0, [(1, 300, heads, 64) for heads in (2, 1, 1)])
        bounds = Shape(n_q=300, documents=(60, 210, 30)).bounds()
        return emulated(kernels, q, k, v, True, bounds=bounds, **options)[:2]
    q, k, v = inputs(1, [(1, 200, 4, 128), (1, 230, 2, 128), (1, 230, 2, 128)])
    k = k * torch.linspace(16, 1, 230)[None, :, None, None].bfloat16()  # The scores outgrow the old maximum.
    return emulated(kernels, q * 4, k, v, True, smooth=False, scale=0.25, **options)[:2]


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
@pytest.mark.parametrize(
    ("capability", "head_dim", "packed", "half_sums"),
    [((8, 0), 128, False, False), ((8, 6), 128, False, True), ((8, 9), 64, True, True), ((9, 0), 64, False, False),
     ((12, 0), 128, True, True)],
)  # fmt: skip
def test_compiles(capability, head_dim, packed, half_sums, tmp_path, monkeypatch):
    """The kernel for each GPU has the products and registers of the design: no division in the loop, few registers in
    memory."""
    assert capability in CAPABILITIES
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    defines = forward_defines(head_dim, True, packed, False, half_sums)
    made = disassembled(nvrtc.compiled(SOURCE, defines, "sm_{}{}".format(*capability)), tmp_path)
    blocks = 2 if head_dim == 128 else 3
    assert blocks * (defines["SHARED_BYTES"] + 1024) <= 100 * 1024
    assert made.registers <= {2: 255, 3: 168}[blocks]
    # A warp has 32 x 64 scores: products of 16 x 8 x 32 codes and 16 x 8 x 16 values.
    assert made.loop["IMMA"] == 2 * 8 * head_dim // 32 and made.loop["HMMA"] == 2 * 4 * head_dim // 8
    assert made.loop["CALL"] == made.loop["I2F"] == 0
    assert made.loop["LDL"] + made.loop["STL"] <= 130
