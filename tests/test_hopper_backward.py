"""The Hopper backward on a machine without a GPU: who does what, in what order dQ lies, and that it compiles."""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sagekernels import hopper, hopper_backward, nvrtc, sage_attention
from sagekernels.reference import RECIPES, document_bounds, twin_backward, twin_forward, visible
from sagekernels.testing import Shape, random_inputs, results_of

SHARED_MEMORY = 227 * 1024
INTERFACE = """
#define DEVICE static inline
#include "hopper_backward_schedule.cuh"
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


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    """hopper_backward_schedule.cuh for this machine's processor."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(INTERFACE)
    options = ["-std=c++17", "-shared", "-fPIC", f"-I{nvrtc.HERE}", "-o", str(folder / "schedule.so")]
    subprocess.run([compiler, *options, str(folder / "schedule.cpp")], check=True)
    return ctypes.CDLL(str(folder / "schedule.so"))


@pytest.mark.parametrize(
    ("n_q", "n_k", "causal", "documents", "heads", "heads_at_once"),
    [
        (320, 320, True, (), 3, 2),
        (300, 300, False, (), 1, 5),
        (130, 333, True, (), 2, 1),
        (1, 257, True, (), 1, 1),
        (257, 70, False, (), 4, 3),
        (1000, 1000, True, (), 5, 2),
        (420, 420, True, (100, 0, 1, 63, 220, 36, 0), 2, 2),
        (420, 420, False, (100, 0, 1, 63, 220, 36, 0), 1, 3),
        (390, 390, False, (10,) * 39, 2, 1),
        (640, 640, True, (128, 64, 192, 256), 1, 1),
    ],
)
def test_schedule(schedule, n_q, n_k, causal, documents, heads, heads_at_once):
    """Each block is taken once; every visible pair is in a tile that is taken and unmasked where no mask is applied;
    the blocks that add to a tile of queries have turns 0, 1, 2, ..., the earlier ones in programs launched earlier."""
    cu_seqlens = torch.tensor((0, *documents)).cumsum(0).int() if documents else None
    bounds = [x.numpy() for x in document_bounds(cu_seqlens, n_k)] if documents else [None, None]
    pointers = [x if x is None else x.ctypes.data for x in bounds]
    problem = Problem(1, n_q, n_k, causal, *pointers, heads, heads_at_once)
    mask = visible(range(n_q), n_k, n_k - n_q, causal, cu_seqlens, torch.device("cpu"))
    sees = np.ones((n_q, n_k), bool) if mask is None else mask.numpy()
    lower, upper = ctypes.c_int(), ctypes.c_int()
    for key in range(n_k + 5):
        schedule.seen(key, ctypes.byref(problem), ctypes.byref(lower), ctypes.byref(upper))
        expected = sees[:, key] if key < n_k else np.zeros(n_q, bool)
        queries = np.arange(n_q)
        assert np.array_equal((queries >= lower.value) & (queries < upper.value), expected)
    blocks, tiles = -(-n_k // 128), -(-n_q // 64)
    taken, turns = set(), {}
    for program in range(blocks * heads):
        w = Work()
        schedule.work(program, ctypes.byref(problem), ctypes.byref(w))
        taken.add((w.bh, w.block))
        part = sees[:, w.block * 128 : (w.block + 1) * 128]
        for m in range(tiles):
            seen = part[m * 64 : (m + 1) * 64]
            inside = w.first <= m < w.last
            assert inside or not seen.any()
            if inside and w.clear <= m < w.blurred:
                assert seen.all() and part.shape[1] == 128
            if inside:
                turns.setdefault((w.bh, m), []).append(schedule.turn(w.block, m, ctypes.byref(problem)))
    assert taken == {(bh, block) for bh in range(heads) for block in range(blocks)}
    assert all(x == list(range(len(x))) for x in turns.values())
    assert set(turns) == {(bh, m) for bh in range(heads) for m in range(tiles)}


RUN = """
#include "hopper_backward_emulator.h"
%s
#include "hopper_backward_emulated.h"
%s
extern "C" void run(int programs, const TensorMap* maps, const float* vectors, const float* k_scale, const int* starts,
                    const int* ends, float* dq_sum, int* turns, float scale, int kv_heads, int group, int n_q, int n_k,
                    int q_tiles, int heads, int heads_at_once, int causal) {
    for (int i = 0; i < programs; i++) {
        memset((void*)memory, 0xFF, sizeof(Shared));
        run_block(i, [&] {
            hopper_backward(maps[0], maps[1], maps[2], maps[3], maps[4], maps[5], maps[6], maps[7], vectors, k_scale,
                            starts, ends, dq_sum, turns, scale, kv_heads, group, n_q, n_k, q_tiles, heads,
                            heads_at_once, causal);
        });
    }
}
"""


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_int64 * 16)]


def host_map(x, rows):
    """What hopper_backward_emulator.h takes for hopper_backward._map."""
    batch, heads, n, d = x.shape
    strides = [s * x.element_size() for s in (x.stride(2), x.stride(1), x.stride(0))]
    box = [rows, min(d, 128 // x.element_size()), x.element_size()]
    return TensorMap((x.data_ptr(), d, n, heads, batch, *strides, 0, *box))


def kernel_on_host(folder, head_dim, half):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    text = (nvrtc.HERE / "hopper_backward.cu").read_text()
    head, rest = text.split("// ---- instructions ----")
    (folder / "kernel.cpp").write_text(RUN % (head, rest.split("// ---- the kernel ----")[1]))
    shared = hopper_backward._shared_bytes(head_dim)
    options = [f"-DHEAD_DIM={head_dim}", f"-DHALF={half}", f"-DSHARED_BYTES={shared}", f"-I{nvrtc.HERE}"]
    options += [f"-I{Path(__file__).parent}", "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", str(folder / "kernel.so"), str(folder / "kernel.cpp")], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def columns(x, value=0.0):
    """[B, heads, N] -> [B, heads, tiles, 64] in the order of column vectors."""
    order = [16 * (p // 16) + 8 * (p // 2 % 2) + 2 * (p // 4 % 4) + p % 2 for p in range(64)]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 64), value=value).unflatten(-1, (-1, 64))[..., order]


@pytest.mark.parametrize(
    ("head_dim", "half", "batch", "n_q", "n_k", "heads", "kv_heads", "causal", "documents", "in_order"),
    [
        (64, 0, 1, 320, 320, 1, 1, True, (), True),
        (128, 1, 1, 200, 200, 2, 1, True, (), False),
        (128, 0, 2, 100, 150, 1, 1, False, (), True),
        (64, 1, 1, 260, 260, 1, 1, False, (100, 0, 1, 63, 96), True),
    ],
)
def test_kernel_on_the_host(
    head_dim, half, batch, n_q, n_k, heads, kv_heads, causal, documents, in_order, tmp_path
):  # fmt: skip
    """The text of the kernel with stand-ins for its instructions (hopper_backward_emulator.h), against the twin."""
    kernel = kernel_on_host(tmp_path, head_dim, half)
    shape = Shape(batch, n_q, n_k, heads, kv_heads, head_dim, causal, documents)
    dtype = torch.float16 if half else torch.bfloat16
    q, k, v, do = random_inputs(shape, dtype=dtype)
    cu_seqlens = shape.cu_seqlens()
    scale = head_dim**-0.5
    options = {"causal": causal, "scale": scale, "cu_seqlens": cu_seqlens, "recipe": "scores"}
    o, saved = twin_forward(q, k, v, smooth_k=True, smooth_q=False, **options)
    expected = twin_backward(do, None, v, o, saved, **options)
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2)
    log2e = math.log2(math.e)
    parts = (columns(saved.q.scale * (scale * log2e)), columns(saved.lse * log2e, math.inf), columns(-delta))
    vectors = torch.stack(parts, 3).contiguous()
    q16, k16 = (x.dequantized().bfloat16() for x in (saved.q, saved.k))
    dk, dv = torch.full_like(v, math.nan), torch.full_like(v, math.nan)
    tiles = -(-n_q // 64)
    sums = torch.zeros(batch, heads, tiles, 64 * head_dim)
    turns = torch.zeros(batch * heads * tiles * 2, dtype=torch.int32)
    transposed = [x.transpose(1, 2) for x in (do, v, dk, dv)]
    maps = (TensorMap * 8)(
        host_map(saved.q.codes, 64), host_map(q16, 64), host_map(transposed[0], 64), host_map(saved.k.codes, 128),
        host_map(k16, 128), host_map(transposed[1], 128), host_map(transposed[2], 64), host_map(transposed[3], 64),
    )  # fmt: skip
    bounds = document_bounds(cu_seqlens, n_k) if documents else (None, None)
    pointer = lambda x: ctypes.c_void_p(None if x is None else x.data_ptr())  # noqa: E731
    kernel.run(
        -(-n_k // 128) * batch * kv_heads, maps, pointer(vectors), pointer(saved.k.scale), *map(pointer, bounds),
        pointer(sums), pointer(turns if in_order else None), ctypes.c_float(scale),
        kv_heads, heads // kv_heads, n_q, n_k, tiles, batch * kv_heads, 1, int(causal),
    )  # fmt: skip
    # the permutation of _finish_dq_kernel
    text = (nvrtc.HERE / "hopper_backward.py").read_text()
    assert "tl.reshape(x, [2, 4, HEAD_DIM // 16, 8, 4, 2, 2]), (1, 5, 3, 0, 2, 4, 6)" in text
    dq = sums.view(batch, heads, tiles, 2, 4, head_dim // 16, 8, 4, 2, 2).permute(0, 1, 2, 4, 8, 6, 3, 5, 7, 9)
    dq = dq.reshape(batch, heads, tiles * 64, head_dim)[:, :, :n_q].transpose(1, 2) * scale
    for x, y in zip((dq, dk, dv), expected, strict=True):
        assert ((x.float() - y.float()).norm() / y.float().norm()).item() < 4e-3


def test_serves_the_recipe_without_int8_gradients():
    assert [name for name, rules in RECIPES.items() if not rules.int8_gradients] == ["scores"]


def test_backend_leaves_other_calls_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "triton_forward", twin_forward)
    monkeypatch.setattr(hopper, "triton_backward", twin_backward)
    inputs = random_inputs(Shape(1, 70, 70, 2, 1, 64, documents=(30, 40)))
    options = {"recipe": "scores", "cu_seqlens": Shape(documents=(30, 40)).cu_seqlens()}
    ours, twin = (results_of(sage_attention, *inputs, backend=backend, **options) for backend in ("hopper", "twin"))
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("half", [0, 1])
def test_compiles(head_dim, half, tmp_path, monkeypatch):
    """The struct in shared memory has the size that the launcher asks for (a static assertion), and there is room."""
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    shared = hopper_backward._shared_bytes(head_dim)
    assert shared <= SHARED_MEMORY
    defines = {"HEAD_DIM": head_dim, "HALF": half, "SHARED_BYTES": shared}
    assert nvrtc.compiled("hopper_backward.cu", defines)[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="static assertion"):
        nvrtc.compiled("hopper_backward.cu", {**defines, "SHARED_BYTES": shared - 1024})


@pytest.mark.parametrize("turns", ["*i32", "constexpr"])
def test_preparation_compiles(turns):
    kernel = hopper_backward._prepare_queries_kernel
    types = {"DO": "*bf16", "O": "*bf16", "Q8": "*i8", "Q16": "*bf16", "TURNS": turns, "scale_log2": "fp32"}
    types |= dict.fromkeys(("Q_SCALE", "LSE", "VECTORS", "SUM"), "*fp32")
    constants = {"HEAD_DIM": 128, "TILE": 64, "LOG2E": math.log2(math.e)}
    constants |= {"TURNS": None} if turns == "constexpr" else {}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    ptx = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert len(re.findall(r"st\.global\.\w+(\.\w+)? ", ptx)) > 4
