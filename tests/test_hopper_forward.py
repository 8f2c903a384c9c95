"""The Hopper forward on a machine without a GPU: hopper_forward.cu compiled for the CPU, and compiled for sm_90a.

The kernel's own source runs with stand-ins for Hopper's instructions (hopper_emulation.h): every thread is a fiber, the
layouts of fragments, descriptors and swizzles are modelled, copies land late and products read late. What differs is
time, and how many registers there are.
"""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import sagekernels
from sagekernels import nvrtc
from sagekernels.hopper_forward import SCHEDULES, SOURCE, mappable
from sagekernels.reference import document_bounds, twin_forward

HERE = Path(__file__).parent
POINTERS = ["q", "k", "v", "k_scale", "starts", "ends", "q_codes", "q_scales", "o", "lse"]
SIZES = ["batch", "heads", "kv_heads", "n_q", "n_k", "nk_padded", "m_blocks", "heads_per_group", "tiles"]


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS), ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in SIZES), ("taken", ctypes.c_void_p), ("grid", ctypes.c_int),
        ("seed", ctypes.c_int),
    ]  # fmt: skip


def defines(head_dim, causal, packed, half=False):
    block_n, consumers, stages = SCHEDULES[head_dim]
    return {
        "HEAD_DIM": head_dim, "BLOCK_N": block_n, "CONSUMERS": consumers, "STAGES": stages, "CAUSAL": int(causal),
        "PACKED": int(packed), "FP16": int(half),
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """(head_dim, causal, packed) -> the function run of hopper_emulation_run.h."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder, loaded = tmp_path_factory.mktemp("emulation"), {}

    def load(*key):
        if key not in loaded:
            text = Path(sagekernels.__file__).with_name(SOURCE).read_text()
            start, end = text.index("// ---- Hopper's instructions"), text.index("// ---- Arithmetic")
            program = folder / ("_".join(map(str, key)) + ".cpp")
            program.write_text(
                text[:start] + '#include "hopper_emulation.h"\n' + text[end:] + '#include "hopper_emulation_run.h"\n'
            )
            macros = [f"-D{name}={value}" for name, value in defines(*key).items()]
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", *macros]
            subprocess.run([*command, str(program), "-o", str(program.with_suffix(".so"))], check=True)
            loaded[key] = ctypes.CDLL(str(program.with_suffix(".so"))).run
        return loaded[key]

    return load


def emulated(on_cpu, q, k, v, causal, *, grid=2, heads_per_group=2, cu_seqlens=None, smooth=True, scale=0.125):
    """o, lse and Q's codes of the kernel with the twin's codes of K; the twin's o, lse and codes."""
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    options = {"causal": causal, "scale": scale, "smooth_k": smooth, "smooth_q": False, "recipe": "fine"}
    o_twin, saved = twin_forward(q, k, v, cu_seqlens=cu_seqlens, **options)
    block_n, consumers, _ = SCHEDULES[head_dim]
    padded = -(-n_k // block_n) * block_n
    ordered = torch.zeros(batch * kv_heads, padded)
    position = [16 * (t // 16) + 4 * (t % 8 // 2) + 2 * (t % 16 // 8) + t % 2 for t in range(n_k)]
    ordered[:, position] = saved.k.scale.flatten(0, 1)
    o, lse = torch.full_like(o_twin, math.nan), torch.full_like(saved.lse, math.nan)
    codes, scales = torch.full_like(saved.q.codes, 77), torch.full_like(saved.q.scale, math.nan)
    starts, ends = (lse, lse) if cu_seqlens is None else document_bounds(cu_seqlens, n_q)
    k_codes, taken = saved.k.codes.contiguous(), torch.zeros(1, dtype=torch.int32)
    tensors = [q.contiguous(), k_codes, v.contiguous(), ordered, starts, ends, codes, scales, o, lse]
    blocks = -(-n_q // (64 * consumers))
    tiles = blocks * batch * heads
    sizes = [batch, heads, kv_heads, n_q, n_k, padded, blocks, heads_per_group, tiles]
    arguments = Arguments(
        *(x.data_ptr() for x in tensors), scale * math.log2(math.e), *sizes, taken.data_ptr(), min(grid, tiles), n_q
    )
    assert on_cpu(head_dim, causal, cu_seqlens is not None)(ctypes.byref(arguments)) == 0
    assert torch.equal(codes, saved.q.codes)
    assert torch.equal(scales, saved.q.scale) or scales.isnan().any()
    return o.float(), lse, o_twin.float(), saved.lse


def inputs(seed, shapes, sigma=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * sigma).bfloat16() for shape in shapes]


def assert_close(o, lse, o_twin, lse_twin):
    assert ((o - o_twin).norm() / o_twin.norm()).item() < 5e-3
    assert torch.allclose(lse, lse_twin, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "n_q", "n_k", "heads", "kv_heads", "head_dim", "causal", "grid", "heads_per_group"),
    [
        (1, 450, 450, 2, 1, 64, True, 2, 2),
        (2, 260, 260, 2, 2, 64, False, 3, 3),
        (1, 130, 333, 3, 1, 128, True, 2, 2),
        (1, 1, 257, 1, 1, 128, True, 8, 1),
        (1, 257, 256, 1, 1, 128, False, 1, 5),
        (2, 64, 64, 1, 1, 64, True, 1, 1),
        (1, 700, 700, 1, 1, 128, True, 1, 1),
    ],
)
def test_schedule(on_cpu, batch, n_q, n_k, heads, kv_heads, head_dim, causal, grid, heads_per_group):
    q, k, v = inputs(n_q, [(batch, n, h, head_dim) for n, h in ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))])
    assert_close(*emulated(on_cpu, q, k + 1, v, causal, grid=grid, heads_per_group=heads_per_group))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [(1, 0, 63, 64, 200, 1, 71), (1,) * 130, (129, 256, 27), (5, 195), (100, 900)])
def test_documents(on_cpu, documents, causal):
    n = sum(documents)
    q, k, v = inputs(n, [(1, n, 2, 64), (1, n, 1, 64), (1, n, 1, 64)])
    cu_seqlens = torch.tensor([0, *documents]).cumsum(0).to(torch.int32)
    assert_close(*emulated(on_cpu, q, k, v, causal, grid=3, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_outgrow_the_old_maximum(on_cpu, head_dim):
    """Keys get larger towards the first, which is visited last: by more than 2^127 from tile to tile."""
    q, k, v = inputs(0, [(1, 400, 1, head_dim)] * 3)
    q, k = q.abs() * 8, k.abs() * torch.linspace(16, -16, 400)[None, :, None, None].bfloat16()
    assert_close(*emulated(on_cpu, q, k, v, True, smooth=False, scale=0.25))


def test_non_finite_values_propagate_and_zeros_do_not(on_cpu):
    q, k, v = inputs(0, [(1, 200, 1, 64)] * 3)
    q[0, 20], q[0, 40, 0, 6] = 0, math.inf
    o, lse, o_twin, lse_twin = emulated(on_cpu, q, k, v, True)
    assert o.isnan().any(-1).flatten().nonzero().flatten().tolist() == [40]
    assert torch.equal(lse.isnan(), lse_twin.isnan())
    assert torch.allclose(o[0, 20], o_twin[0, 20], atol=1e-2)


def test_mappable_copies_what_a_tensor_map_cannot_describe():
    x = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 5, 3, 3, 64, dtype=torch.bfloat16).unbind(2)[1]
    assert mappable(x) is x and mappable(packed) is packed and mappable(x[:1, :1]) is not None
    for odd in (x.mT.contiguous().mT, x[:1, :1].expand_as(x), torch.zeros(2, 5, 3, 68, dtype=x.dtype)[..., 2:66]):
        assert mappable(odd).is_contiguous()


def test_tensor_maps_of_odd_strides_are_refused():
    for odd in (torch.zeros(8, 12, dtype=torch.int8), torch.zeros(8, 64).mT, torch.zeros(1, 64).expand(8, 64)):
        with pytest.raises(ValueError, match="no tensor map"):
            nvrtc.tensor_map(odd, (8, 8))


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
@pytest.mark.parametrize(("head_dim", "causal", "packed", "half"), [(64, True, True, True), (128, True, False, False)])
def test_compiles(head_dim, causal, packed, half, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    cubin = nvrtc.compiled(SOURCE, defines(head_dim, causal, packed, half))
    assert cubin[:4] == b"\x7fELF" and len(list(tmp_path.iterdir())) == 1
    assert nvrtc.compiled(SOURCE, defines(head_dim, causal, packed, half)) == cubin
    with pytest.raises(RuntimeError, match="HEAD_DIM"):
        nvrtc.compiled(SOURCE, {})
