"""How the portable kernels are launched: tile sizes by architecture and head dimension; and what a device is."""

import contextlib
import functools
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


# kernel -> family of architectures -> {head dimension as held: tiles}. In the backward kernels the side that is looped
# over is TILE: it is the span of one scale. "portable" fits the 99 KiB of shared memory of Ada and consumer Blackwell;
# only Hopper was tuned.
TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "forward": {
        "hopper": {
            32: Tiles(128, 64, 4, 3),
            64: Tiles(128, 64, 4, 3),
            128: Tiles(64, 64, 4, 3),
            256: Tiles(128, 64, 8, 2),
        },
        "portable": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(64, 64, 4, 3),
            128: Tiles(64, 64, 4, 2),
            256: Tiles(64, 32, 8, 2),
        },
    },
    "dkdv": {
        "hopper": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(64, 64, 4, 3),
            128: Tiles(64, 128, 8, 3),
            256: Tiles(64, 64, 8, 1),
        },
        "portable": {
            32: Tiles(64, 64, 4, 2),
            64: Tiles(64, 64, 4, 2),
            128: Tiles(64, 64, 8, 1),
            256: Tiles(64, 32, 8, 1),
        },
    },
    "dq": {
        "hopper": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(64, 64, 4, 3, max_registers=168),
            128: Tiles(64, 64, 4, 2),
            256: Tiles(64, 64, 8, 1),
        },
        "portable": {
            32: Tiles(64, 64, 4, 2),
            64: Tiles(64, 64, 4, 2),
            128: Tiles(64, 64, 8, 1),
            256: Tiles(32, 64, 8, 1),
        },
    },
}


def family(capability: tuple[int, int]) -> str:
    """Row of TABLE for a compute capability."""
    if capability < (8, 0):
        raise NotImplementedError(
            f"the triton backend needs compute capability 8.0 (Ampere) or newer, got {capability[0]}.{capability[1]}"
        )
    return "hopper" if capability[0] == 9 else "portable"


def launch_tiles(kernel: str, device: torch.device, held_head_dim: int, exact: bool) -> Tiles:
    """Tiles for this device. `exact` asks for TILE x TILE: where a scale or a mean spans exactly one tile."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    tiles = TABLE[kernel][family(capability)][held_head_dim]
    return tiles._replace(block_m=TILE, block_n=TILE) if exact else tiles


# Of a device with its index, as tensors have it; kept because torch takes a microsecond to look a property up.
@functools.cache
def is_hopper(device: torch.device) -> bool:
    """An H100 or H200."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def half_sums(device: torch.device) -> bool:
    """Whether tensor cores add up 16-bit products twice as fast in float16 as in float32: GeForce cards, by design. The
    professional cards of the same chips and compute capability (L40S, RTX 6000) do not."""
    return device.type == "cuda" and "GeForce" in torch.cuda.get_device_name(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make x's GPU the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
