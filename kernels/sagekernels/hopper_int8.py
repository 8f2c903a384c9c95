"""Products of INT8 codes on Hopper: the launcher of hopper_int8.cu.

The formulas are those of int8_matmul.product_twin. kernels/NOTES.md has the schedule and the measurements.
"""

import torch
from torch import Tensor

from .casts import MULTIPLE
from .launch import ceil_div, multiprocessors, on_device_of
from .nvrtc import load, tensor_map

ARCHITECTURE, SOURCE = "sm_90a", "hopper_int8.cu"
BLOCK_M, BLOCK_N, BLOCK_K, CONSUMERS = 128, 256, 128, 2
STAGES, CLUSTER = 4, 2
GROUP = 16
"""The number of tiles of a cluster below each other that are computed before those to their right."""


def defines_of(dtype: torch.dtype) -> dict[str, int]:
    """Return the macros of hopper_int8.cu."""
    shared = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K + CONSUMERS * (2 * 64 * 128 + 4 * BLOCK_N) + 20 * STAGES + 24
    return {
        "CLUSTER": CLUSTER, "STAGES": STAGES, "RESULT": dtype.itemsize // 2, "FP16": int(dtype == torch.float16),
        "SHARED_BYTES": -(-shared // 1024) * 1024,
    }  # fmt: skip


def takes(columns: int) -> bool:
    """Return whether the copy engine can store rows of so many results."""
    return columns % MULTIPLE == 0


def hopper_int8_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, crowded: bool = False
) -> Tensor:
    """Compute int8_matmul.int8_product_triton, bit for bit. Codes and scales are contiguous, and rows of codes begin at
    multiples of 16 bytes.

    Args:
        crowded: other kernels may hold multiprocessors meanwhile.
    """
    (rows, inner), (columns, _) = a.shape, b.shape
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    defines = defines_of(dtype)
    tiles = ceil_div(rows, BLOCK_M * CLUSTER) * ceil_div(columns, BLOCK_N)
    with on_device_of(a):
        load(SOURCE, "int8_product", defines, ARCHITECTURE).launch(
            (CLUSTER * min(multiprocessors(a.device) // CLUSTER, tiles),), (128 * (CONSUMERS + 1),),
            defines["SHARED_BYTES"], tensor_map(a[None], (1, BLOCK_M, BLOCK_K)),
            tensor_map(b[None], (1, BLOCK_N // CLUSTER, BLOCK_K)),
            tensor_map(out[None, None], (1, 1, 64, 128 // dtype.itemsize)), a_scale, b_scale,
            rows, columns, inner, GROUP,
            torch.zeros(1, dtype=torch.int32, device=a.device) if crowded else None,
        )  # fmt: skip
    return out
