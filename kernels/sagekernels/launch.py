"""Choose how the portable kernels are launched, by architecture and head dimension, and find out what a device is."""

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .quantize import TILE


class Tiles(NamedTuple):
    """The tiles of a kernel: BLOCK_M queries by BLOCK_N keys per step, warps per program, depth of its software
    pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """The registers of a thread. With fewer registers more programs fit on a multiprocessor, at the price of spills."""

    @property
    def launch(self) -> dict[str, int | None]:
        """The constants and options of a launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, **options}


# The table maps kernel -> family of architectures -> {head dimension as held: tiles}. In the backward kernels the side
# that is looped over is TILE, the span of one scale. "portable" fits the 99 KiB of shared memory of Ada and consumer
# Blackwell. Its tiles have no fewer rows than columns where registers allow. Otherwise Triton gives a row to several
# warps, and row maxima and operands go through shared memory. The tiles were timed on an H100 only, also as code for
# 8.0 (NOTES.md).
TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "forward": {
        "sm_90": {
            32: Tiles(128, 64, 4, 3),
            64: Tiles(128, 64, 4, 3),
            128: Tiles(64, 64, 4, 3),
            256: Tiles(128, 64, 8, 2),
        },
        "portable": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(128, 64, 4, 2),
            128: Tiles(128, 64, 8, 3),
            256: Tiles(64, 32, 8, 2),
        },
    },
    "dkdv": {
        "sm_90": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(64, 64, 4, 3),
            128: Tiles(64, 128, 8, 3),
            256: Tiles(64, 64, 8, 1),
        },
        "portable": {
            32: Tiles(64, 64, 4, 2),
            64: Tiles(64, 64, 4, 2),
            128: Tiles(64, 128, 8, 2),
            256: Tiles(64, 32, 8, 1),
        },
    },
    "dq": {
        "sm_90": {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(64, 64, 4, 3, max_registers=168),
            128: Tiles(64, 64, 4, 2),
            256: Tiles(64, 64, 8, 1),
        },
        "portable": {
            32: Tiles(64, 64, 4, 2),
            64: Tiles(128, 64, 4, 2),
            128: Tiles(128, 64, 8, 2),
            256: Tiles(32, 64, 8, 1),
        },
    },
}


def check_int8(capability: tuple[int, int], *, by_tensor_memory: bool = False) -> None:
    """Raise NotImplementedError, with what to use instead, where INT8 products are slower than 16-bit ones, or do not
    exist.

    Args:
        by_tensor_memory: the kernel is one that Triton 3.8 compiles to a B200's own instructions (tcgen05), as that of
            linear layers. Earlier ones compile it to instructions of a fraction of their speed.
    """
    found = ".".join(map(str, capability))
    if capability < (8, 0):
        raise NotImplementedError(f"the triton backend needs compute capability 8.0 (Ampere) or newer, got {found}")
    if capability == (10, 3):
        raise NotImplementedError(
            f"INT8 products of compute capability {found} (B300) run at 7 % of the speed of bf16; use attention.backend"
            " flash or sdpa, linear.precision bf16 or fp8"
        )
    if by_tensor_memory and capability[0] == 10 and _version(triton.__version__) < (3, 8):
        raise NotImplementedError(
            f"INT8 products on compute capability {found} (B200) need Triton 3.8 or newer, which has its instructions,"
            f" this is {triton.__version__}; install it, or use linear.precision bf16 or fp8"
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def family(capability: tuple[int, int]) -> str:
    """Return the row of TABLE for a compute capability."""
    check_int8(capability)
    return "sm_90" if capability[0] == 9 else "portable"


def launch_tiles(kernel: str, device: torch.device, held_head_dim: int, *, exact: bool = False) -> Tiles:
    """Return the tiles for this device.

    Args:
        exact: TILE x TILE, where a scale spans exactly one tile.
    """
    rows = family(capability(device) if device.type == "cuda" else (8, 0))
    tiles = TABLE[kernel][rows][held_head_dim]
    if exact:  # The forward's scores of 64 rows are for 4 warps. With 8 warps, two would share each row.
        warps = min(tiles.num_warps, 4) if kernel == "forward" and held_head_dim <= 128 else tiles.num_warps
        tiles = tiles._replace(block_m=TILE, block_n=TILE, num_warps=warps)
    return tiles


@functools.cache  # torch takes a microsecond to look a property up.
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device with its index, as tensors have it; (0, 0) if it is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def half_sums(device: torch.device) -> bool:
    """Return whether tensor cores add up 16-bit products twice as fast in float16 as in float32.

    They do on GeForce cards, by design, and not on professional cards with the same chips and compute capability (L40S,
    RTX 6000), so the name decides.
    """
    return device.type == "cuda" and "GeForce" in torch.cuda.get_device_name(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make x's GPU the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def ceil_div(length: int, size: int) -> int:
    """Return how many tiles of a size cover a length. triton.cdiv does the same but costs 2 microseconds of Python."""
    return -(-length // size)
