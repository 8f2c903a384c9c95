"""The Hopper forward on a machine without a GPU: the emulator runs hopper_forward.cu, and it compiles for sm_90a."""

import ctypes
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
from emulator import Emulated, tensor_map, wrong_results
from sagekernels import nvrtc
from sagekernels.call import Call
from sagekernels.hopper_forward import ARCHITECTURE, SCHEDULES, SOURCE, defines_of
from sagekernels.reference import twin_forward
from sagekernels.testing import Shape

ARRIVE = "if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);\n        at = next;"
ISSUE = """wait(shared.v_full[at.stage], at.parity);
        wait(shared.k_full[next.stage], next.parity);
        issue_scores(next.stage);
        issue_values(at.stage);"""
LAST_WAIT = "wgmma_wait<0>();\n        pin(o);\n        pin(p);"
MISTAKES = [
    {ISSUE: "wait(shared.k_full[next.stage], next.parity); issue_scores(next.stage); issue_values(at.stage );"},
    {ISSUE: "wait(shared.v_full[at.stage], at.parity); issue_scores(next.stage); issue_values(at.stage );"},
    {
        ISSUE: ISSUE.replace("\n", " ") + "if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage ]);",
        ARRIVE: "at = next;",
    },
    {"wgmma_wait<1>();\n        pin(s);": "pin(s);"},
    {LAST_WAIT: "wgmma_wait<1>(); pin(o); pin(p);"},
    {LAST_WAIT: "narrow(); wgmma_wait<0>(); pin(o); pin(p);"},
    {"wait(shared.free[stage], at.parity ^ 1);": "wait(shared.free[stage], at.parity);"},
    {"wait(shared.free[stage], at.parity ^ 1);": ""},
    {"K_BYTES + SCALE_BYTES": "K_BYTES"},
    {"operand<D>(shared.k[stage])": "operand<192 - D>(shared.k[stage])"},
    {"key <= last[r]": "key < last[r]"},
    {"key >= first[r]": "key > first[r]"},
    {"Ring{0, parity ^ 1}": "Ring{0, parity}"},
    {"barrier_init(shared.free[i], 4 * CONSUMERS);": "barrier_init(shared.free[i], 3 * CONSUMERS);"},
    {"wait(shared.q_coded[wg], parity);": ""},
    {"wait(shared.q_full[wg], now);": ""},
    {"fence_async();": ""},
    {"copies_wait_read(), arrive(shared.q_free[wg]);": "arrive(shared.q_free[wg ]);"},
    {"barrier_init(shared.q_free[i], 4 + 1);": "barrier_init(shared.q_free[i], 4 );"},
    {"D == 128 ? row % 8 : row / 2 % 4": "D == 64 ? row % 8 : row / 2 % 4"},
    {"part.skipped >= 0": "part.skipped > 0"},
    {"wait(shared.q_free[wg], free);": ""},
    {"l[r] *= alpha[r];": ""},
    {"wait(shared.v_full[at.stage], at.parity);\n        mine.issue_scores(next.stage);":
     "mine.issue_scores(next.stage );"},
    {"fence_barriers();": ""},
    {"pin(o);\n        wgmma_fence();": "pin(o);"},
    {"wgmma_wait<1>();\n        pin(mine.s);": "pin(mine.s);"},
    {"wgmma_wait<0>();\n        pin(mine.o);": "pin(mine.o);"},
    {"more_registers<CONSUMER_REGISTERS>();": "more_registers<CONSUMER_REGISTERS + 8>();"},
    {"atomicAdd(taken, 1)": "atomicAdd(taken, 2)"},
    {"wait(shared.k_full[at.stage], at.parity);\n            wait(shared.v_full[at.stage], at.parity);": ""},
    {"w.hi - 1 - last": "0"},
    {"shared.part[free ^ 1][wg] = part;": "shared.part[0][wg] = part;"},
    {"operand(shared.v[stage], V_BYTES / HALVES)": "operand(shared.v[stage], V_BYTES)"},
    {"next = mine.skip(next, skipped);\n            wait(shared.k_full[next.stage], next.parity);":
     "next = mine.skip(next, skipped);"},
    {"o[i] *= alpha[i / 2 % 2];": ";"},
    {"!(sum[0] + sum[1] <= LIMIT)": "false"},
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """(head_dim, causal, packed, half, sinks) -> the kernel, which can make MISTAKES."""
    folder = tmp_path_factory.mktemp("forward")
    return functools.cache(lambda *key: Emulated(folder, SOURCE, "forward", defines_of(*key), MISTAKES))


def emulated(
    kernels, q, k, v, causal, *, grid=2, heads_per_group=2, bounds=None, smooth=True, scale=0.125, sinks=None, **options
):  # fmt: skip
    """Return o, lse and Q's codes of the kernel, which gets the twin's codes of K, and the twin's o, lse and codes."""
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    o_twin, saved = twin_forward(Call(q, k, v, bounds, causal, scale, smooth, "fine", None, sinks))
    block_n, consumers, _ = SCHEDULES[head_dim]
    padded = -(-n_k // block_n) * block_n
    ordered = torch.zeros(batch * kv_heads, padded)
    position = [16 * (t // 16) + 4 * (t % 8 // 2) + 2 * (t % 16 // 8) + t % 2 for t in range(n_k)]
    ordered[:, position] = saved.k.scale.flatten(0, 1)
    o, lse = torch.full_like(o_twin, math.nan), torch.full_like(saved.lse, math.nan)
    codes, scales = torch.full_like(saved.q.codes, 77), torch.full_like(saved.q.scale, math.nan)
    starts, ends = (None, None) if bounds is None else bounds
    k_codes, taken = saved.k.codes.contiguous(), torch.zeros(1, dtype=torch.int32)
    blocks = -(-n_q // (64 * consumers))
    tiles = blocks * batch * heads
    kernel = kernels(head_dim, causal, bounds is not None, q.dtype == torch.float16, sinks is not None)
    wrong = kernel(
        min(grid, tiles), 128 * (consumers + 1),
        tensor_map(q, (1, 64, 1, 64)), tensor_map(k_codes.view(-1, n_k, head_dim), (1, block_n, head_dim), head_dim),
        tensor_map(v, (1, block_n, 1, 64)), tensor_map(codes, (1, 1, 64, head_dim), head_dim),
        ordered, starts, ends, saved.sink_scores, scales, o, lse, scale * math.log2(math.e),
        heads, kv_heads, batch * heads, n_q, n_k, padded, blocks, heads_per_group, tiles, taken, **options,
    )  # fmt: skip
    assert not wrong, wrong
    assert torch.equal(codes, saved.q.codes)
    assert torch.equal(scales, saved.q.scale) or scales.isnan().any()
    return o.float(), lse, o_twin.float(), saved.lse


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
def test_schedule(kernels, batch, n_q, n_k, heads, kv_heads, head_dim, causal, grid, heads_per_group):
    q, k, v = inputs(n_q, [(batch, n, h, head_dim) for n, h in ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))])
    assert_close(*emulated(kernels, q, k + 1, v, causal, grid=grid, heads_per_group=heads_per_group))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [(1, 0, 63, 64, 200, 1, 71), (1,) * 130, (129, 256, 27), (5, 195), (100, 900)])
def test_documents(kernels, documents, causal):
    assert_bounds_are_kept(functools.partial(emulated, kernels, grid=3), documents, None, causal)


@WINDOWS
def test_windows(kernels, documents, window, causal):
    assert_bounds_are_kept(functools.partial(emulated, kernels, grid=3), documents, window, causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_outgrow_the_old_maximum(kernels, head_dim):
    assert_scores_may_outgrow_the_maximum(functools.partial(emulated, kernels), head_dim, 400)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks(kernels, head_dim):
    assert_sinks_are_another_score(functools.partial(emulated, kernels), head_dim)


def test_non_finite_values_propagate_and_zeros_do_not(kernels):
    assert_non_finite_values_propagate(functools.partial(emulated, kernels))


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_found(kernels, mistake):
    assert wrong_results(mistaken, kernels, mistake)


def mistaken(kernels, case, **options):
    if case == "documents":
        q, k, v = inputs(0, [(1, 800, heads, 64) for heads in (2, 1, 1)])
        bounds = Shape(n_q=800, documents=(129, 620, 51)).bounds()
        return emulated(kernels, q, k, v, True, bounds=bounds, **options)[:2]
    # With an offset of 64, warpgroups skip tiles.
    q, k, v = inputs(1, [(1, 820, 2, 128), (1, 884, 1, 128), (1, 884, 1, 128)])
    k = k * torch.linspace(16, 1, 884)[None, :, None, None].bfloat16()  # The scores outgrow the old maximum.
    return emulated(kernels, q * 4, k, v, True, smooth=False, scale=0.25, **options)[:2]


def test_mappable_copies_what_a_tensor_map_cannot_describe():
    x = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 5, 3, 3, 64, dtype=torch.bfloat16).unbind(2)[1]
    assert nvrtc.mappable(x) is x and nvrtc.mappable(packed) is packed and nvrtc.mappable(x[:1, :1]) is not None
    for odd in (x.mT.contiguous().mT, x[:1, :1].expand_as(x), torch.zeros(2, 5, 3, 68, dtype=x.dtype)[..., 2:66]):
        assert nvrtc.mappable(odd).is_contiguous()


def test_tensor_maps_of_odd_strides_are_refused():
    for odd in (torch.zeros(8, 12, dtype=torch.int8), torch.zeros(8, 64).mT, torch.zeros(1, 64).expand(8, 64)):
        with pytest.raises(ValueError, match="no tensor map"):
            nvrtc.tensor_map(odd, (8, 8))


def test_a_launch_passes_every_type_of_argument(monkeypatch):
    launched, encoded = [], []

    def call(function, *arguments):
        if function == "cuTensorMapEncodeTiled":
            encoded.append(arguments)
        if function == "cuLaunchKernel":
            read = [kind.from_address(p).value for kind, p in zip(kinds, arguments[-2][1:], strict=True)]
            launched.append((arguments[-2][0], read, arguments[1:7], arguments[8].value))

    monkeypatch.setattr(nvrtc, "_call", call)
    monkeypatch.setattr(nvrtc, "compiled", lambda *_: b"")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    x = torch.zeros(3, 8, 64)
    maps = [nvrtc.tensor_map(y, (1, 8, 32)) for y in (x, x.clone(), x[:2], x)]
    assert len(encoded) == 3 and maps[3] is maps[0] and len({m.address for m in maps}) == 3
    kinds = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_float]
    nvrtc.Kernel("any.cu", "any", {}, "sm_90a").launch((5,), (384,), 1024, maps[0], x, None, 2**31 - 1, -3, 0.25)
    assert launched == [(maps[0].address, [x.data_ptr(), None, 2**31 - 1, -3, 0.25], (5, 1, 1, 384, 1, 1), 7)]


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
@pytest.mark.parametrize(("head_dim", "causal", "packed", "half"), [(64, True, True, True), (128, True, False, False)])
def test_compiles(head_dim, causal, packed, half, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    cubin = nvrtc.compiled(SOURCE, defines_of(head_dim, causal, packed, half), ARCHITECTURE)
    assert cubin[:4] == b"\x7fELF" and len(list(tmp_path.iterdir())) == 1
    assert nvrtc.compiled(SOURCE, defines_of(head_dim, causal, packed, half), ARCHITECTURE) == cubin
    with pytest.raises(RuntimeError, match="HEAD_DIM"):
        nvrtc.compiled(SOURCE, {}, ARCHITECTURE)
