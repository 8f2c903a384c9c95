"""The product of INT8 codes for Hopper on a machine without a GPU: the emulator runs hopper_int8.cu, and it compiles
for sm_90a."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulator import Emulated, tensor_map, wrong_results
from sagekernels import nvrtc
from sagekernels.hopper_int8 import ARCHITECTURE, BLOCK_K, BLOCK_M, BLOCK_N, CLUSTER, CONSUMERS, SOURCE, defines_of
from sass import disassembled

MISTAKES = [
    {"wait(shared.free[at.stage], at.parity ^ 1);\n            shared.tile[at.stage] = tile;":
     "shared.tile[at.stage] = tile;"},
    {"if (step) wait(shared.full[at.stage], at.parity);": ""},
    {"wait(shared.sent_free, sent ^ 1);": ""},
    {"wait_sent(shared.sent_full, sent);": ""},
    {"atomicAdd(taken, 1)": "atomicAdd(taken, 2)"},
    {"shared.tile[at.stage] = -1;": "shared.tile[at.stage] = 0;"},
    {"A_BYTES + B_BYTES": "A_BYTES"},
    {"if (step) give_back(before);": "give_back(at.stage);"},
    {"wgmma_wait<0>();": "wgmma_wait<1>();"},
    {"wgmma_fence();": ""},
    {"step + j > 0": "j > 0"},
    {"Ring{0, parity ^ 1}": "Ring{0, parity}"},
    {"rank * PART * BLOCK_K": "0"},
    {"left + rank * PART": "left"},
    {"barrier_init(shared.free[i], 4 * CONSUMERS * CLUSTER);": "barrier_init(shared.free[i], 4 * CONSUMERS);"},
    {"if (lane < CLUSTER) arrive_at(shared.free[stage], lane);": "if (lane < CLUSTER) arrive(shared.free[stage]);"},
    {"if (thread == 0) copies_wait_read<1>();": ""},
    {"fence_async();": ""},
    {"(i + lane / 16) ^ line % 8": "i + lane / 16"},
    {"of_row[e / 2 % 2]": "of_row[0]"},
    {"8 * (i + e / 4)": "8 * i"},
    {"fence_barriers();": ""},
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Emulated]:
    folder = tmp_path_factory.mktemp("int8")
    return functools.cache(lambda dtype: Emulated(folder, SOURCE, "int8_product", defines_of(dtype), MISTAKES))


def emulated(
    kernels: Callable[..., Emulated],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    clusters: int = 2,
    crowded: bool = True,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """Return the kernel's result, and the one of the same roundings by torch."""
    rows, columns, inner = sizes
    draw = torch.Generator().manual_seed(rows)
    a, b = (torch.randint(-127, 128, (n, inner), dtype=torch.int8, generator=draw) for n in (rows, columns))
    a_scale, b_scale = (torch.exp2(3 * torch.randn(n, 1, generator=draw)) for n in (rows, columns))
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    said = kernels(dtype)(
        CLUSTER * clusters, 128 * (CONSUMERS + 1), tensor_map(a[None], (1, BLOCK_M, BLOCK_K)),
        tensor_map(b[None], (1, BLOCK_N // CLUSTER, BLOCK_K)),
        tensor_map(out[None, None], (1, 1, 64, 128 // dtype.itemsize)), a_scale, b_scale,
        rows, columns, inner, 2, torch.zeros(1, dtype=torch.int32) if crowded else None,
        resident=CLUSTER * clusters, **options,
    )  # fmt: skip
    assert not said, said
    return out, ((a.double() @ b.double().t()).float() * a_scale * b_scale.t()).to(dtype)


@pytest.mark.parametrize(("sizes", "dtype"), [
    ((130, 272, 144), torch.bfloat16),
    ((300, 272, 784), torch.bfloat16),
    ((1, 16, 16), torch.float16),
    ((300, 32, 784), torch.float32),
])  # fmt: skip
def test_products_have_the_bits_of_torch(
    kernels: Callable[..., Emulated], sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Sizes fill no tile, and a block has several tiles or none."""
    for crowded in (True, False):
        found, expected = emulated(kernels, sizes, dtype, crowded=crowded)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mistake", range(1, len(MISTAKES) + 1))
def test_mistakes_are_seen(kernels: Callable[..., Emulated], mistake: int) -> None:
    assert wrong_results(mistaken, kernels, mistake)


def mistaken(kernels: Callable[..., Emulated], case: str, **options: int) -> list[Tensor]:
    sizes = (300, 272, 784) if case == "documents" else (700, 272, 112)
    return [emulated(kernels, sizes, torch.bfloat16, clusters=1, **options)[0]]


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_follow_one_another_without_waiting(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing spills. A release for the whole cluster would fence all of the GPU's memory at every step."""
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    code = disassembled(nvrtc.compiled(SOURCE, defines_of(dtype), ARCHITECTURE), tmp_path, "IGMMA")
    assert code.stack == 0 and code.loop["IGMMA"] == BLOCK_K // 32
    assert code.loop["WARPGROUP"] == 2 and not code.loop["MEMBAR"]
