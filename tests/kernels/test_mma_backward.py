"""The backward by mma.sync on a machine without a GPU: the emulator runs mma_prepare.cu and mma_backward.cu."""

import functools
import math

import pytest
import torch

from emulator import Emulated, wrong_results
from kernel_inputs import call_of
from sagekernels import nvrtc
from sagekernels.mma import CAPABILITIES, KEYS, backward_defines, schedule
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, exact_results, random_inputs, random_sinks, rel_l2
from sass import disassembled

NAMES = ("dq", "dk", "dv")
MISTAKES = [
    {"copies_wait<0>();\n        __syncthreads();": "__syncthreads();"},
    {"copies_wait<0>();\n        __syncthreads();": "copies_wait<0>();"},
    {"load(next(), (t + 1) % 2);": "load(next(), t % 2);"},
    {"STAGES == 1 && t + 1 < tiles": "false", "STAGES == 2 && t + 1 < tiles": "t + 1 < tiles"},
    {"__syncthreads();  // maxima are there, and nobody reads the tile or dS of the one before": "__syncwarp();"},
    {"__syncthreads();  // dS of the last tile is there": "__syncwarp();"},
    {"__syncwarp();  // the inverses are there": ""},
    {"__syncwarp();  // they are read": ""},
    {"t && warp >= WARPS / 2": "t && warp > WARPS / 2"},
    {"store_shared_word(address(sm.largest[(t + 1) % 2]) + 4 * thread, 0);": ";"},
    {"store_shared_word(address(sm.largest[(t + 1) % 2]) + 4 * thread, 0);":
     "store_shared_word(address(sm.largest[t % 2 ]) + 4 * thread, 0);"},
    {"16 * thread < sizeof(Stage) - WHOLE": "false"},
    {"first_key + row < n_k": "true"},
    {"m < work.clear || m >= work.blurred": "m < work.clear || m > work.blurred"},
    {"m < work.clear || m >= work.blurred": "m + 1 < work.clear || m >= work.blurred"},
    {"(u32)(upper - lower)": "(u32)(upper - lower + 1)"},
    {"m * QUERIES + at % 4 * 2 - lower": "m * QUERIES + at % 4 * 2 - lower + 1"},
    {"with[r] = __fmaf_rn(MAGIC, factor[r], with[r]);": ";"},
    {"sum[n][e] -= with[e / 2];": "sum[n][e] -= with[0];"},
    {"t % TAKEN_BACK == TAKEN_BACK - 1": "t % TAKEN_BACK > 0"},
    {"lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2": "lane / 16 * 4 + lane / 4 % 2 * 2 + lane / 8 % 2"},
    {"__fmaf_rn(p[j][2], of[j].x, MAGIC)": "__fmaf_rn(p[j][2], of[j].y, MAGIC)"},
    {"tile - m + q_tiles + work.last - 1": "tile - m + work.last - 1"},
    {"m > work.first ? m - 1 : work.last - 1": "m > work.first ? m - 1 : work.last"},
    {"n_k > key": "true"},
    {"p[j][2 + e] *= ks[1];": "p[j][2 + e] *= ks[0];"},
    {"place<KEYS>(g, warp) + 8 * j * KEYS + 4 * c": "place<KEYS>(g, warp) + 8 * j * KEYS + 4 * (c ^ 1)"},
    {"-MAGIC * all": "-MAGIC * unit_of[0][r]"},
    {"512 * i + 128 * n + 32 * e": "512 * i + 128 * n + 32 * (e ^ 1)"},
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The name of a kernel and its macros -> the kernel. The backward can make MISTAKES."""
    folder = tmp_path_factory.mktemp("backward")

    @functools.cache
    def kernel(name, *defines):
        if name == "backward":
            return Emulated(folder, "mma_backward.cu", name, backward_defines(*defines, 1), MISTAKES)
        macros = dict(zip(("HEAD_DIM", "FP16", "HALF_SUMS"), map(int, defines), strict=True))
        return Emulated(folder, "mma_prepare.cu", name, macros)

    return kernel


def backward(kernels, do, v, o, saved, causal, bounds, stages, half_sums=False, terms=None, **options):
    """Run mma_backward with kernels of the emulator. terms are call.sink_terms."""
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    scale, half = head_dim**-0.5, v.dtype == torch.float16
    q_tiles, keys = -(-n_q // 64), KEYS[head_dim]
    blocks = -(-n_k // keys)
    k_tiles = blocks * (keys // 64)
    rows = batch * heads * q_tiles * 64
    queries = torch.full((rows * (5 * head_dim + 16),), 99, dtype=torch.uint8)
    k_turned = torch.full((batch * kv_heads * k_tiles * 64 * head_dim,), 99, dtype=torch.int8)
    units, sums = (torch.full((n,), math.nan) for n in (rows, rows * head_dim))
    dq, dk, dv = (torch.full(x.shape, math.nan, dtype=v.dtype) for x in (do, v, v))
    values, v_units = v, None
    if half_sums:
        values, v_units = (
            torch.full(v.shape, math.nan, dtype=torch.float16),
            torch.full((batch * kv_heads * k_tiles,), math.nan),
        )
    q_codes, k_codes = saved.q.codes.contiguous(), saved.k.codes.contiguous()
    defines = (head_dim, half, half_sums)
    calls = [
        ("queries", defines, batch * heads * q_tiles, 128, do, o, q_codes, saved.q.scale, saved.lse,
         saved.sink_scores, queries, units, sums, terms, scale, scale * math.log2(math.e), heads, n_q, q_tiles,
         *do.stride()[:3]),
        ("keys", defines, batch * kv_heads * k_tiles, 128, k_codes, k_turned, n_k, k_tiles),
        ("values", defines, batch * kv_heads * k_tiles * half_sums, 128, v, values, v_units, kv_heads, n_k, k_tiles,
         *v.stride()[:3]),
        ("backward", (head_dim, half, half_sums, stages), blocks * batch * kv_heads, 2 * keys, queries, k_codes,
         saved.k.scale, k_turned, values, v_units, *((None, None) if bounds is None else bounds), sums, dk, dv, scale,
         kv_heads, heads // kv_heads, n_q, n_k, q_tiles, k_tiles, batch * kv_heads, 1, int(causal),
         *values.stride()[:3]),
        ("narrow", defines, batch * heads * q_tiles, 128, sums, units, terms,
         None if terms is None else saved.k_mean, dq, scale, heads, heads // kv_heads, n_q, q_tiles),
    ]  # fmt: skip
    for name, macros, grid, threads, *arguments in calls:
        wrong = kernels(name, *macros)(grid, threads, *arguments, **(options if name == "backward" else {}))
        assert not wrong, f"{name}: {wrong}"
    return dq, dk, dv


def results(kernels, shape, stages=1, dtype=torch.bfloat16, half_sums=False, inputs=None, **options):
    """Return the gradients of the kernels, of the twin, and exact ones."""
    q, k, v, do = inputs or random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype)
    bounds = shape.bounds()
    call = call_of(shape, q, k, v, "fine", sinks=random_sinks(shape))
    o, saved = twin_forward(call)
    terms = torch.full_like(saved.lse, math.nan) if shape.sinks else None
    ours = backward(kernels, do, v, o, saved, shape.causal, bounds, stages, half_sums, terms, **options)
    exact = exact_results(
        q, k, v, do, causal=shape.causal, cu_seqlens=shape.cu_seqlens(), window=shape.window, sinks=call.sinks
    )
    call = call.backward(do, o, saved)
    twin = twin_backward(call)
    if shape.sinks:
        torch.testing.assert_close(terms, call.sink_terms, rtol=1e-4, atol=1e-6)
    return ours, twin, exact


def assert_close(ours, twin, exact):
    for name, x, y in zip(NAMES, ours, twin, strict=True):
        judge = getattr(exact, name)
        assert rel_l2(x, y) < 6e-3, name
        assert rel_l2(x, judge) < 1.05 * rel_l2(y, judge) + 1e-3, name


# Each pair of head_dim, stages and half_sums is in some case. Each triple would be a library to compile.
@pytest.mark.parametrize(("shape", "stages", "dtype", "half_sums"), [
    (Shape(1, 200, 333, 2, 1, 128, True), 2, torch.bfloat16, False),
    (Shape(1, 200, 200, 2, 2, 128, False), 1, torch.bfloat16, True),
    (Shape(1, 210, 210, 2, 1, 128, True, (100, 0, 1, 63, 46)), 2, torch.float16, False),
    (Shape(1, 1, 129, 2, 1, 64), 1, torch.bfloat16, False),
    (Shape(1, 210, 210, 1, 1, 64, False, (100, 0, 1, 63, 46)), 1, torch.bfloat16, False),
    (Shape(1, 330, 330, 2, 1, 64, True), 2, torch.bfloat16, True),
    (Shape(2, 100, 40, 2, 2, 64, False), 2, torch.float16, True),
    (Shape(2, 170, 170, 1, 1, 64, True, (), 70), 1, torch.bfloat16, False),
    (Shape(1, 210, 210, 2, 1, 64, True, (90, 120), 70, True), 1, torch.bfloat16, False),
], ids=str)  # fmt: skip
def test_agrees_with_the_twin_and_with_float64(kernels, shape, stages, dtype, half_sums):
    assert_close(*results(kernels, shape, stages, dtype, half_sums))


@pytest.mark.parametrize("half_sums", [False, True])
def test_gradients_of_any_size_and_queries_of_zeros(kernels, half_sums):
    """The magnitudes of dO and V differ by 2^40 from query to query and tile to tile. Some queries have Q or dO of
    zero."""
    shape = Shape(1, 130, 130, 1, 1, 64)
    q, k, v, do = random_inputs(shape, seed=1)
    q[0, 5], q[0, 64:], do[0, 7] = 0, 0, 0
    do[0, 10:20] *= 2.0**-40
    v[0, 64:] *= 2.0**-40
    ours, twin, exact = results(kernels, shape, 1 + half_sums, half_sums=half_sums, inputs=(q, k, v, do))
    assert_close(ours, twin, exact)
    for rows in (slice(5, 6), slice(64, 130), slice(10, 20)):
        assert rel_l2(ours[0][:, rows], exact.dq[:, rows]) < 0.03
    assert not ours[0][0, 7].any()


def test_slices_and_broadcast_gradients(kernels):
    shape = Shape(1, 100, 100, 2, 2, 64)
    q, k, v = torch.randn(1, 100, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(2)
    do = torch.randn(1, 2, 100, 64, generator=torch.Generator().manual_seed(1)).bfloat16().transpose(1, 2)
    assert_close(*results(kernels, shape, inputs=(q, k, v, do)))


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_non_finite_values_propagate(kernels, where):
    """A value that is not finite reaches everything that depends on it, and not the other head."""
    shape = Shape(1, 150, 150, 2, 2, 64)
    inputs = random_inputs(shape)
    inputs[["q", "k", "v", "do"].index(where)][0, 70, 1, 3] = math.nan
    q, k, v, do = inputs
    o, saved = twin_forward(call_of(shape, q, k, v, "fine", smooth_k=False))
    dq, dk, dv = backward(kernels, do, v, o, saved, True, None, 1)
    assert all(x[:, :, 0].isfinite().all() for x in (dq, dk, dv))
    assert not dq[0, 70, 1].isfinite().any() and not (dv if where == "do" else dk)[0, :71, 1].isfinite().any()


def test_values_in_units_of_their_tiles(kernels):
    v = random_inputs(Shape(2, 70, 200, 1, 3, 64), seed=2)[2] * torch.logspace(-30, 30, 200)[None, :, None, None]
    v = v.bfloat16()
    v[0, 64:128, 1] = 0
    rows, units = torch.full(v.shape, math.nan, dtype=torch.float16), torch.full((2 * 3 * 4,), math.nan)
    assert not kernels("values", 64, False, True)(2 * 3 * 4, 128, v, rows, units, 3, 200, 4, *v.stride()[:3])
    units = units.view(2, 3, 4).repeat_interleave(64, 2)[:, :, :200].transpose(1, 2)[..., None]
    assert torch.equal(torch.frexp(units).mantissa, torch.full_like(units, 0.5))
    assert rows.abs().max() < 16 and rel_l2(rows.float() * units, v) < 1e-4
    largest = torch.nn.functional.pad(rows.abs().float(), (0, 0, 0, 0, 0, 56)).unflatten(1, (4, 64)).amax((2, 4))
    assert ((largest >= 8) | (largest == 0)).all()


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_found(kernels, mistake):
    assert wrong_results(mistaken, kernels, mistake, seeds=2)


def mistaken(kernels, case, **options):
    if case == "documents":
        shape, stages = Shape(1, 210, 210, 1, 1, 64, False, (60, 100, 50)), 1
    else:
        shape, stages = Shape(1, 170, 170, 6, 2, 128), 2
    q, k, v, do = random_inputs(shape)
    o, saved = twin_forward(call_of(shape, q, k, v, "fine"))
    return backward(kernels, do, v, o, saved, shape.causal, shape.bounds(), stages, **options)


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
@pytest.mark.parametrize(("capability", "head_dim", "half_sums", "memory", "how"), [
    ((8, 0), 128, False, 164, (2, 1)), ((8, 9), 64, True, 100, (1, 2)), ((9, 0), 64, False, 228, (2, 3)),
    ((12, 0), 128, True, 100, (1, 1)),
])  # fmt: skip
def test_compiles(capability, head_dim, half_sums, memory, how, tmp_path, monkeypatch):
    """The kernel for each GPU has the products of the design, no division in the loop, and few registers in memory."""
    assert capability in CAPABILITIES and schedule(64, 164 << 10) == (1, 3)
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    assert schedule(head_dim, memory << 10) == how
    defines = backward_defines(head_dim, False, half_sums, *how)
    architecture = "sm_{}{}".format(*capability)
    made = disassembled(nvrtc.compiled("mma_backward.cu", defines, architecture), tmp_path)
    assert made.registers <= {1: 255, 2: 255, 3: 168}[defines["BLOCKS"]]
    # A warp has 16 keys x 64 queries: S, dV, dK and dQ in codes, dP in 16 bits. dQ stands there twice.
    assert made.loop["IMMA"] == 5 * head_dim // 4 and made.loop["HMMA"] == head_dim // 2
    assert made.loop["CALL"] == made.loop["I2F"] == 0
    assert made.loop["LDL"] + made.loop["STL"] <= 75 and made.loop["BAR"] == 2
    prepare = {"HEAD_DIM": head_dim, "FP16": 0, "HALF_SUMS": int(half_sums)}
    assert nvrtc.compiled("mma_prepare.cu", prepare, architecture)[:4] == b"\x7fELF"
