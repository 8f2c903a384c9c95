"""The Hopper backward on a machine without a GPU: the division of work, the order in which dQ lies, and compilation."""

import ctypes
import functools
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from emulator import Emulated, tensor_map, wrong_results
from kernel_inputs import call_of
from sagekernels import hopper_backward, nvrtc
from sagekernels.hopper_forward import ARCHITECTURE
from sagekernels.reference import twin_backward, twin_forward, visible
from sagekernels.testing import Shape, random_inputs, random_sinks
from sass import compiled

SHARED_MEMORY = 227 * 1024
INTERFACE = """
#define DEVICE static inline
#include "backward_schedule.cuh"
extern "C" void work(int program, const Problem& p, Work& w) { w = work_of(program, p); }
extern "C" void seen(int key, const Problem& p, int& lower, int& upper) { seen_by(key, p, lower, upper); }
extern "C" int turn(int block, int tile, const Problem& p) { return turn_of(block, tile, p); }
"""


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("kv_heads", "n_q", "n_k", "causal")),
        *((name, ctypes.c_void_p) for name in ("starts", "ends")),
        *((name, ctypes.c_int) for name in ("heads", "heads_at_once")),
    ]


class Work(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("bh", "block", "first", "last", "clear", "blurred")]


@pytest.fixture(scope="module", params=hopper_backward.KEYS)
def schedule(request, tmp_path_factory):
    """backward_schedule.cuh of one head_dim, compiled for this machine's processor, and the keys of a block."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    keys = hopper_backward.KEYS[request.param]
    (folder / "schedule.cpp").write_text(f"constexpr int KEYS = {keys};{INTERFACE}")
    options = ["-std=c++17", "-shared", "-fPIC", f"-I{nvrtc.HERE}"]
    subprocess.run([compiler, *options, str(folder / "schedule.cpp"), "-o", str(folder / "schedule.so")], check=True)
    return ctypes.CDLL(str(folder / "schedule.so")), keys


@pytest.mark.parametrize(("n_q", "n_k", "causal", "documents", "heads", "heads_at_once", "window"), [
    (320, 320, True, (), 3, 2, None), (300, 300, False, (), 1, 5, None), (130, 333, True, (), 2, 1, None),
    (1, 257, True, (), 1, 1, None), (257, 70, False, (), 4, 3, None), (1000, 1000, True, (), 5, 2, None),
    (420, 420, True, (100, 0, 1, 63, 220, 36, 0), 2, 2, None),
    (420, 420, False, (100, 0, 1, 63, 220, 36, 0), 1, 3, None), (390, 390, False, (10,) * 39, 2, 1, None),
    (640, 640, True, (128, 64, 192, 256), 1, 1, None),
    *((420, 420, True, (100, 1, 63, 220, 36), 2, 2, w) for w in (1, 10, 64, 100, 300)),
    *((420, 420, False, (100, 1, 63, 220, 36), 2, 2, w) for w in (1, 10, 64, 100, 300)),
    *((1000, 1000, True, (), 3, 2, w) for w in (10, 64, 300)),
])  # fmt: skip
def test_schedule(schedule, n_q, n_k, causal, documents, heads, heads_at_once, window):
    """Each block is taken once. Every visible pair is in a tile that is taken, and in an unmasked one where no mask
    applies. The blocks that add to a tile of queries have turns 0, 1, 2, ..., and earlier turns are in programs
    launched earlier."""
    schedule, keys = schedule
    bounds = Shape(n_q=n_q, documents=documents, window=window).bounds()
    pointers = [None, None] if bounds is None else [x.data_ptr() for x in bounds]
    problem = Problem(1, n_q, n_k, causal, *pointers, heads, heads_at_once)
    mask = visible(range(n_q), n_k, n_k - n_q, causal, bounds, torch.device("cpu"))
    sees = np.ones((n_q, n_k), bool) if mask is None else mask.numpy()
    lower, upper = ctypes.c_int(), ctypes.c_int()
    for key in range(n_k + 5):
        schedule.seen(key, ctypes.byref(problem), ctypes.byref(lower), ctypes.byref(upper))
        expected = sees[:, key] if key < n_k else np.zeros(n_q, bool)
        queries = np.arange(n_q)
        assert np.array_equal((queries >= lower.value) & (queries < upper.value), expected)
    blocks, tiles = -(-n_k // keys), -(-n_q // 64)
    taken, turns = set(), {}
    for program in range(blocks * heads):
        w = Work()
        schedule.work(program, ctypes.byref(problem), ctypes.byref(w))
        taken.add((w.bh, w.block))
        part = sees[:, w.block * keys : (w.block + 1) * keys]
        for m in range(tiles):
            seen = part[m * 64 : (m + 1) * 64]
            inside = w.first <= m < w.last
            assert inside or not seen.any()
            if inside and w.clear <= m < w.blurred:
                assert seen.all() and part.shape[1] == keys
            if inside:
                turns.setdefault((w.bh, m), []).append(schedule.turn(w.block, m, ctypes.byref(problem)))
    assert taken == {(bh, block) for bh in range(heads) for block in range(blocks)}
    assert all(x == list(range(len(x))) for x in turns.values())
    assert set(turns) == {(bh, m) for bh in range(heads) for m in range(tiles)}


def host_map(x, rows):
    """Build the emulator's version of hopper_backward._map."""
    columns = min(x.shape[3], 128 // x.element_size())
    return tensor_map(x, (1, 1, rows, columns), columns * x.element_size())


def prepared(q_scale, lse, delta, head_dim):
    """Return the result of _prepare_queries_kernel for three [B, heads, N]: [B, heads, tiles, 256 or 192]."""

    def tiles(x, value=0.0):
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 64), value=value).unflatten(-1, (-1, 64))

    q_scale, lse, delta = tiles(q_scale), tiles(lse, math.inf), tiles(-delta)
    if hopper_backward.FLOATS[head_dim] == 4:
        upper = (delta.view(torch.int32) & ~8191).view(torch.float32)
        return torch.stack((upper, delta - upper, q_scale, lse.clamp(max=1e30)), -1).flatten(-2)
    order = [16 * (p // 16) + 8 * (p // 2 % 2) + 2 * (p // 4 % 4) + p % 2 for p in range(64)]
    return torch.cat([x[..., order] for x in (q_scale, lse, delta)], -1)


MISTAKES = [
    {
        "signal(sm.codes_free[now]);": "if (t == 0) signal(sm.codes_free[now]);",
        "if (t + 1 < tiles) wait(sm.codes_full[next], parity(t + 1));":
            "if (t + 1 < tiles) { wait(sm.codes_full[next ], parity(t + 1)); signal(sm.codes_free[next]); }",
    },
    {
        "signal(sm.wide_free[now]);": "",
        "issue_dk(now);": "issue_dk(now); signal(sm.wide_free[now ]);",
    },
    {
        "if (lane == 0) arrive(sm.ds_free[t & 1]);": "",
        "wait(sm.ds_full[t & 1], t >> 1 & 1);":
            "wait(sm.ds_full[t & 1 ], t >> 1 & 1); if (lane == 0 && t >= 0) arrive(sm.ds_free[t & 1]);",
    },
    {"fence_async();\n        __syncwarp();": "__syncwarp();"},
    {"fence_async();\n        warpgroup_barrier(wg);": "warpgroup_barrier(wg);"},
    {"fence_async();\n        warpgroup_barrier(wg);": "fence_async();"},
    {"fence_async();\n        signal(sm.dq_full[wg]);": "signal(sm.dq_full[wg]);"},
    {
        "fence_async();\n    if (tiles > 1 && mine(tiles - 2)) signal(sm.dq_full[wg]);":
            "if (tiles > 1 && mine(tiles - 2 )) signal(sm.dq_full[wg] );"
    },
    {"wait(sm.ds_full[t & 1], t >> 1 & 1);": ""},
    {"wait(sm.ds_free[t & 1], t >> 1 & 1 ^ 1);": ""},
    {"wait(sm.ds_free[t & 1], t >> 1 & 1 ^ 1);": "wait(sm.ds_free[t & 1], t >> 1 & 1);"},
    {"wait(sm.dq_free[wg], t / ROUND & 1 ^ 1);": ""},
    {"wait(sm.wide_full[now], parity(t));": ""},
    {"if (t + 1 < tiles) wait(sm.codes_full[next], parity(t + 1));": ""},
    {"wait(sm.codes_free[place(i)], parity(i) ^ 1);": ""},
    {"wait(sm.wide_free[place(i)], parity(i) ^ 1);": ""},
    {"wait(sm.keys_full, 0);": ""},
    {"row / 2 % 4": "row % 4"},
    {"column % 64 * 2 + 16 ^ row % 8 << 4": "column % 64 * 2 + 16 ^ row % 4 << 4"},
    {"thread / KEYS * (D / 2) + 16 * i": "16 * i"},
    {"0x7650 + j % 4": "0x7653 - j % 4"},
    {"wgmma_wait<1>();\n        pin(dp);": "pin(dp);"},
    {"wgmma_wait<1>();\n            pin(p16);": "pin(p16);"},
    {"wgmma_wait<1>();\n            pin(dq);": "pin(dq);"},
    {"wgmma_wait<0>();\n        pin(dq);": "pin(dq);"},
    {"wgmma_wait<0>();\n        pin(s);": "wgmma_wait<1>();"},
    {"(u32)(upper - lower)": "(u32)(upper - lower + 1)"},
    {"m * QUERIES + 2 * (thread % 4) - lower": "m * QUERIES + 2 * (thread % 4) - lower + 1"},
    {"(bh * q_tiles + m) * BLOCKS_D + block": "(bh * q_tiles + m) * BLOCKS_D + BLOCKS_D - 1 - block"},
    {"wg / ROUND * KEYS * 64": "0"},
    {"load_relaxed(turns + part) != turn": "load_relaxed(turns + part) < 0"},
    {"turn_of(work.block, m, problem)": "turn_of(work.block, m, problem) + 1"},
    {"copies_wait<1>(), add_relaxed(turns + before, 1);": "add_relaxed(turns + before, 1);"},
    {"copies_wait<1>(), add_relaxed(turns + before, 1);": "copies_wait_read(), add_relaxed(turns + before, 1);"},
    {"copies_wait_read();\n                    arrive(sm.dq_free[from]);": "arrive(sm.dq_free[from]);"},
    {"wait(sm.dq_full[from], i / ROUND & 1);": ""},
    {
        "(wg * 64 + warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4)":
            "(wg * 64 + warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 4) << 4)"
    },
    {"arrive_expect(bar, QUERIES * D * 4);": "arrive_expect(bar, QUERIES * D * 2);"},
    {"copies_commit();\n        copies_wait_read();": "copies_commit();"},
    {"if (rounds) wait(sm.dq_free[wg], rounds - 1 & 1);": ""},
    {"barrier_init(sm.dq_full[i], 4);": "barrier_init(sm.dq_full[i], 3);"},
    {"operand(sm.q[stage], QUERIES * 128)": "operand(sm.q[stage], QUERIES * 64)"},
    {"barrier_init(sm.codes_free[i], 4 * CONSUMERS);": "barrier_init(sm.codes_free[i], 8);"},
    {"barrier_init(sm.wide_free[i], 4 * CONSUMERS);": "barrier_init(sm.wide_free[i], 8);"},
    {"barrier_init(sm.ds_full[i], 4 * CONSUMERS);": "barrier_init(sm.ds_full[i], 8);"},
    {"barrier_init(sm.ds_free[i], 4 * BLOCKS_D);": "barrier_init(sm.ds_free[i], 8);"},
    {"mine(t - 1)": "mine(t)"},
    {"t > 1 && mine(t - 2)": "t > 1 && mine(t - 1)"},
    {"tiles > 1 && mine(tiles - 2)": "tiles > 1 && mine(tiles - 1)"},
    {"block * ROUND + i % ROUND": "block * ROUND"},
    {"t / ROUND & 1 ^ 1": "t & 1 ^ 1"},
    {"tiles + ROUND - 1 - wg % ROUND": "tiles + ROUND - 1"},
    {"thread % KEYS": "thread % 128"},
    {"same % 4 < 2": "same % 4 < 1"},
    {"operand<16>(sm.vectors[stage], 0)": "operand<16>(sm.vectors[stage] + 4, 0)"},
]  # fmt: skip
OF_CLUSTERS = [
    {"cluster_barrier();  // No warpgroup needs its tiles any more, and the warps that add dQ have ended.": ""},
    {"cluster_barrier();  // They are there.": ""},
    {"cluster_barrier();  // Other blocks may still read this one's shared memory.": ""},
    {"warpgroup_barrier(wg);  // The next part goes to the same place.": ""},
    {"rank * share": "0"},
    {"blockIdx.x % CLUSTER": "0"},
    {"load_shared_of(other, own + (8 * part + i) * STEP)": "load_shared_of(rank, own + (8 * part + i) * STEP)"},
    {"of_v ? 1.f : scale": "1.f"},
    {"(D / 8 + i) * STEP": "(D / 8 - 1 + i) * STEP"},
    {"part % BLOCKS_D * 64": "0"},
    {"part += CLUSTER": "part += 2 * CLUSTER"},
    {"address(sm.dO[0] + wg * 4096)": "address(sm.dO[0])"},
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """(head_dim, half, cluster) -> the kernel in hopper_emulator, which can make MISTAKES, or those OF_CLUSTERS."""
    folder = tmp_path_factory.mktemp("backward")

    def kernel(head_dim, half, cluster):
        defines = hopper_backward.defines_of(head_dim, half, cluster)
        mistakes = MISTAKES if cluster == 1 else OF_CLUSTERS
        return Emulated(folder, "hopper_backward.cu", "hopper_backward", defines, mistakes)

    return functools.cache(kernel)


def emulated(kernels, shape, half=False, in_order=False, cluster=1, **options):
    """Return dQ, dK and dV of the kernel and of the twin, and the sums of dQ."""
    dtype = torch.float16 if half else torch.bfloat16
    batch, n_q, n_k, heads, kv_heads = shape.batch, shape.n_q, shape.n_k, shape.heads, shape.kv_heads
    q, k, v, do = random_inputs(shape, k_mean=2.0 * shape.sinks, dtype=dtype)
    head_dim, bounds = q.shape[3], shape.bounds()
    scale = head_dim**-0.5
    call = call_of(shape, q, k, v, "scores", sinks=random_sinks(shape))
    o, saved = twin_forward(call)
    saved = saved._replace(k_mean=None)  # The term of dQ that comes of it is not the kernel's.
    expected = twin_backward(call.backward(do, o, saved))
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2)
    log2e = math.log2(math.e)
    vectors = prepared(saved.q.scale * (scale * log2e), saved.lse * log2e, delta, head_dim)
    q16 = saved.q.dequantized().bfloat16()
    dk, dv = torch.full_like(v, math.nan), torch.full_like(v, math.nan)
    tiles = -(-n_q // 64)
    sums = torch.zeros(batch, heads, tiles, 64 * head_dim)
    turns = torch.zeros(batch * heads * tiles * (head_dim // 64), dtype=torch.int32) if in_order else None
    keys, parts = hopper_backward.KEYS[head_dim], head_dim // 64
    boxes = [(saved.q.codes, 64), (q16, 64), (do.transpose(1, 2), 64), (saved.k.codes, keys)]
    boxes += [(v.transpose(1, 2), keys), (dk.transpose(1, 2), 64), (dv.transpose(1, 2), 64)]
    maps = [host_map(x, rows) for x, rows in boxes]
    wrong = kernels(head_dim, half, cluster)(
        -(-n_k // keys) * batch * kv_heads * cluster, 2 * keys + 128, *maps, vectors, saved.k.scale,
        *((None, None) if bounds is None else bounds), sums, turns, scale,
        kv_heads, heads // kv_heads, n_q, n_k, tiles, batch * kv_heads, 1, int(shape.causal),
        **{"resident": max(cluster, 2)} | options,
    )  # fmt: skip
    assert not wrong, wrong
    # This is the permutation of _finish_dq_kernel.
    text = (nvrtc.HERE / "hopper_backward.py").read_text()
    assert "tl.reshape(x, [HEAD_DIM // 64, 4, 8, 8, 4, 2, 2]), (1, 5, 3, 0, 2, 4, 6)" in text
    dq = sums.view(batch, heads, tiles, parts, 4, 8, 8, 4, 2, 2).permute(0, 1, 2, 4, 8, 6, 3, 5, 7, 9)
    dq = dq.reshape(batch, heads, tiles * 64, head_dim)[:, :, :n_q].transpose(1, 2) * scale
    return (dq, dk, dv), expected, sums


def assert_close(ours, expected, sums):
    for x, y in zip(ours, expected, strict=True):
        assert ((x.float() - y.float()).norm() / y.float().norm()).item() < 4e-3


@pytest.mark.parametrize(("shape", "half", "in_order"), [
    (Shape(1, 320, 320, 1, 1, 64, True, ()), False, True), (Shape(1, 200, 200, 2, 1, 128, True, ()), False, False),
    (Shape(2, 100, 150, 1, 1, 128, False, ()), False, True),
    (Shape(1, 260, 260, 1, 1, 64, False, (100, 0, 1, 63, 96)), True, True),
    (Shape(1, 300, 420, 2, 1, 64, True, ()), True, False), (Shape(2, 70, 40, 1, 1, 64, False, ()), False, False),
    (Shape(2, 200, 200, 1, 1, 64, True, (), 70), False, True),
    (Shape(1, 300, 300, 2, 1, 64, True, (90, 120, 90), 70, True), False, True),
])  # fmt: skip
def test_kernel(kernels, shape, half, in_order):
    assert_close(*emulated(kernels, shape, half, in_order))


@pytest.mark.parametrize(("shape", "half", "in_order", "cluster"), [
    (Shape(1, 150, 150, 2, 1, 128), False, True, 2), (Shape(1, 100, 210, 4, 1, 128), True, False, 2),
    (Shape(1, 260, 260, 3, 1, 64, False, (100, 0, 1, 63, 96)), False, False, 3),
    (Shape(2, 220, 220, 4, 2, 64, True, (90, 120, 10), 70, True), True, True, 2),
    (Shape(1, 70, 70, 4, 1, 128, True, (), 40, True), False, True, 4), (Shape(1, 1, 230, 2, 1, 64), False, True, 2),
    (Shape(1, 64, 40, 5, 1, 64, False), False, False, 5),
])  # fmt: skip
def test_heads_apart(kernels, shape, half, in_order, cluster):
    """Blocks of a cluster have each a part of the query heads of a key head. dK and dV are the same bits twice."""
    found, expected, sums = emulated(kernels, shape, half, in_order, cluster)
    assert_close(found, expected, sums)
    again, _, _ = emulated(kernels, shape, half, in_order, cluster, seed=1, resident=2 * cluster)
    assert all(map(torch.equal, found[0 if in_order else 1 :], again[0 if in_order else 1 :]))


@pytest.mark.parametrize(("blocks", "group", "cluster"), [
    (231, 4, (1, 1)), (230, 4, (2, 1)), (66, 4, (4, 1)), (64, 4, (4, 2)), (1, 1, (1, 1)), (1, 16, (8, 8)),
    (64, 11, (1, 1)), (32, 12, (6, 3)),
])  # fmt: skip
def test_how_heads_are_divided(blocks, group, cluster):
    """A cluster is no larger than what gives the H200's 132 multiprocessors enough programs."""
    assert tuple(hopper_backward.cluster_of(blocks, group, 132, work) for work in hopper_backward.ENOUGH) == cluster


TIMED = [
    # One sequence of 1B, 3B, 8B, and parts of them.
    ((1, 4096, 16, 4, 128), 2, 4), ((1, 4096, 8, 2, 128), 4, 2), ((1, 4096, 12, 4, 128), 3, 4),
    ((1, 4096, 24, 8, 128), 1, 8), ((1, 4096, 32, 8, 128), 1, 8), ((1, 4096, 28, 4, 128), 7, 4),
    ((1, 4096, 16, 4, 64), 4, 4), ((1, 4096, 16, 16, 128), 1, 8),
    # 1B by its tokens.
    ((1, 1024, 16, 4, 128), 4, 4), ((1, 2048, 16, 4, 128), 4, 4), ((1, 6144, 16, 4, 128), 2, 4),
    ((1, 8192, 16, 4, 128), 1, 4), ((1, 16384, 16, 4, 128), 1, 1), ((2, 4096, 16, 4, 128), 1, 8),
    ((3, 4096, 16, 4, 128), 1, 12), ((4, 4096, 16, 4, 128), 1, 2), ((8, 4096, 16, 4, 128), 1, 2),
    # Others with many tokens.
    ((1, 8192, 32, 8, 128), 1, 1), ((4, 4096, 24, 8, 128), 1, 2), ((4, 4096, 28, 4, 128), 1, 1),
    ((4, 4096, 16, 4, 64), 1, 16),
]  # fmt: skip
EQUAL = [((1, 4096, 16, 4, 128), 1, 2), ((1, 1024, 16, 4, 128), 4, 4), ((1, 2048, 16, 4, 128), 2, 4),
         ((1, 16384, 16, 4, 128), 1, 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "cluster", "at_once", "work"),
    [(*row, work) for work, rows in (("causal", TIMED), ("equal", EQUAL)) for row in rows],
)
def test_choices_for_shapes_that_an_h200_timed(sizes, cluster, at_once, work):
    """No choice was slower than one program for all query heads, with heads by the cache (results/log/kernels.md)."""
    batch, tokens, heads, kv_heads, head_dim = sizes
    blocks, group = -(-tokens // hopper_backward.KEYS[head_dim]) * batch * kv_heads, heads // kv_heads
    of_heads = batch * kv_heads, tokens * group * head_dim * 9, blocks, 132, work
    assert hopper_backward.cluster_of(blocks, group, 132, work) == cluster
    assert hopper_backward.heads_at_once(*of_heads, in_order=False) == at_once


def test_heads_with_blocks_in_order_run_by_the_cache():
    """Blocks that add to dQ in order were not timed in one group."""
    found = [hopper_backward.heads_at_once(12, 18 << 20, 384, 132, "causal", order) for order in (False, True)]
    assert found == [12, 6]


@pytest.mark.parametrize("mistake", range(1, len(OF_CLUSTERS) + 1))
def test_mistakes_of_clusters_are_found(kernels, mistake):
    assert wrong_results(of_cluster, kernels, mistake)


def of_cluster(kernels, case, **options):
    shape = Shape(1, 200, 200, 2, 1, 64, False) if case != "documents" else Shape(1, 200, 200, 3, 1, 128, True)
    (_, dk, dv), _, sums = emulated(kernels, shape, in_order=True, cluster=shape.heads, **options)
    return dk, dv, sums


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_found(kernels, mistake):
    """dQ in order always has the same bits."""
    assert wrong_results(mistaken, kernels, mistake)


def mistaken(kernels, case, **options):
    shape = (
        Shape(1, 300, 300, 1, 1, 64, False) if case != "documents" else Shape(1, 300, 300, 1, 1, 128, False, (100, 200))
    )
    (_, dk, dv), _, sums = emulated(kernels, shape, in_order=True, resident=3, **options)
    return dk, dv, sums


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize(("head_dim", "half", "cluster"), [(64, 0, 1), (128, 1, 1), (64, 1, 4), (128, 0, 3)])
def test_compiles(head_dim, half, cluster, tmp_path, monkeypatch):
    """The struct in shared memory has the size that the launcher asks for (a static assertion), and it fits."""
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    defines = hopper_backward.defines_of(head_dim, half, cluster)
    shared = defines["SHARED_BYTES"]
    assert shared <= SHARED_MEMORY
    assert nvrtc.compiled("hopper_backward.cu", defines, ARCHITECTURE)[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="static assertion"):
        nvrtc.compiled("hopper_backward.cu", {**defines, "SHARED_BYTES": shared - 1024}, ARCHITECTURE)


@pytest.mark.parametrize(("turns", "head_dim"), [("*i32", 128), ("constexpr", 64)])
def test_preparation_compiles(turns, head_dim):
    types = {"DO": "*bf16", "O": "*bf16", "Q8": "*i8", "Q16": "*bf16", "TURNS": turns, "scale_log2": "fp32"}
    types |= dict.fromkeys(("Q_SCALE", "LSE", "VECTORS", "SUM", "SINK_SCORES", "SINK_TERMS"), "*fp32")
    constants = {"HEAD_DIM": head_dim, "TILE": 64, "LOG2E": math.log2(math.e)}
    constants["FLOATS"] = hopper_backward.FLOATS[head_dim]
    if turns == "constexpr":
        constants |= dict.fromkeys(("TURNS", "SINK_SCORES", "SINK_TERMS"))
    kernel = hopper_backward._prepare_queries_kernel
    ptx = compiled(kernel, 90, constants, types, kernel.arg_names).asm["ptx"]
    assert len(re.findall(r"st\.global\.\w+(\.\w+)? ", ptx)) > 4


@pytest.mark.parametrize(("head_dim", "sinks"), [(64, True), (128, False)])
def test_narrowing_compiles(head_dim, sinks):
    types = dict.fromkeys(("SUM", "SINK_TERMS", "MEAN"), "*fp32") | {"DQ": "*bf16", "scale": "fp32"}
    constants = {"HEAD_DIM": head_dim} | ({} if sinks else dict.fromkeys(("SINK_TERMS", "MEAN")))
    kernel = hopper_backward._finish_dq_kernel
    assert "st.global" in compiled(kernel, 90, constants, types, kernel.arg_names).asm["ptx"]
