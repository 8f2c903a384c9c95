"""How the portable kernels are launched: tile sizes by architecture and head dimension, and the current device."""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from .quantize import TILE


class Tiles(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys per step, warps per program, depth of its software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Per thread: with fewer registers more programs fit on a multiprocessor, at the price of spills."""


# kernel -> [(smallest compute capability, {head dimension as held: tiles})], newest first. In the backward kernels the
# side that is looped over is TILE: it is the span of one scale. An architecture without a row takes the one below it.
TABLE: dict[str, list[tuple[int, dict[int, Tiles]]]] = {
    "forward": [
        (90, {32: Tiles(128, 64, 4, 3), 64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)}),
        (80, {32: Tiles(64, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 2)}),
    ],
    "dkdv": [
        (90, {32: Tiles(64, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 8, 3), 256: Tiles(64, 64, 8, 1)}),
        (80, {32: Tiles(64, 64, 4, 2), 64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(64, 32, 8, 1)}),
    ],
    "dq": [
        (
            90,
            {32: Tiles(64, 64, 4, 3), 64: Tiles(64, 64, 4, 3, 168), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8, 1)},
        ),
        (80, {32: Tiles(64, 64, 4, 2), 64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(32, 64, 8, 1)}),
    ],
}


def launch_tiles(kernel: str, device: torch.device, held_head_dim: int, exact: bool) -> Tiles:
    """Row of TABLE for this device. `exact` asks for TILE x TILE: where a scale or a mean spans exactly one tile."""
    capability = 80
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        if capability < 80:
            raise NotImplementedError(
                f"the triton backend needs compute capability 8.0 (Ampere) or newer, got {major}.{minor}"
            )
    tiles = next(row for least, row in TABLE[kernel] if capability >= least)[held_head_dim]
    return tiles._replace(block_m=TILE, block_n=TILE) if exact else tiles


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make x's GPU the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
