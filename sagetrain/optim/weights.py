"""The memory of master weights: in fp32, in bf16 rounded by chance, or in bf16 with what rounding left (Kahan).

Rounding to the nearest number would lose every update that is smaller than half a step of bf16. Rounding by chance goes
up with the probability of what is cut off, so that updates add up on average. Its bits depend on the seed, the update
and the place in the whole tensor, and so they are the same at every layout.
"""

from __future__ import annotations

import zlib
from typing import Literal, TypeVar

import torch
from torch import Tensor

from sagekernels.adamw import Chance, Master
from sagetrain.optim.pieces import TensorPiece, Weights
from sagetrain.optim.states import Fp32

_Number = TypeVar("_Number", int, Tensor)
MasterKind = Literal["fp32", "bf16_chance", "bf16_kahan"]
_LOW = 0xFFFFFFFF
_AT_ONCE = 2**23
"""The largest number of values that are rounded by chance at once."""


class ChanceWeights:
    """Master weights in bf16, in the memory of the engine. New values are rounded by chance, from the seed of the
    run."""

    def __init__(self, piece: TensorPiece, seed: int) -> None:
        self._piece, self._seed = piece, seed

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a copy in fp32."""
        return self._piece.weight[start:stop].float()

    def write(self, values: Tensor, start: int = 0, update: int = 0) -> None:
        """Set the weights from position `start` on. Numbers of bf16 stay as they are."""
        # The random bits take 8 bytes a value, and Muon writes whole matrices.
        for part in values.split(_AT_ONCE):
            bits = chance(places(self._piece, start, len(part)), self._seed, update, self._piece.spec.name)
            self._piece.weight[start : start + len(part)] = round_by_chance(part, bits)
            start += len(part)

    def master(self, update: int, start: int = 0, stop: int | None = None) -> Master:
        """Return the memory for the kernel of the update: see pieces.Weights."""
        piece, key = self._piece, _key(self._seed, update, self._piece.spec.name)
        values, first = piece.weight[start:stop], piece.start + start
        if width := _width(piece):
            return Master(values, chance=Chance(key, first, width, piece.spec.shape[1], piece.slice * width))
        return Master(values, chance=Chance(key, first + piece.slice * (piece.spec.size // piece.slices)))


class KahanWeights:
    """Master weights in bf16, in the memory of the engine, beside the part that rounding has left, in bf16 as well. The
    sum of both is a number of fp32, which checkpoints hold."""

    def __init__(self, piece: TensorPiece) -> None:
        self._values, self._rest = piece.weight, torch.zeros_like(piece.weight, requires_grad=False)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the sum of both parts, a copy in fp32."""
        return self._values[start:stop].float().add_(self._rest[start:stop])

    def write(self, values: Tensor, start: int = 0, update: int = 0) -> None:
        """Set both parts from position `start` on."""
        # What remains of a value may round to another sum. Splitting that sum again gives parts that stay as they are.
        for _ in range(2):
            rounded = values.bfloat16()
            rest = (values - rounded).bfloat16()
            values = rounded.float().add_(rest)
        self._values[start : start + len(values)], self._rest[start : start + len(values)] = rounded, rest

    def master(self, update: int, start: int = 0, stop: int | None = None) -> Master:
        """Return the memory for the kernel of the update: see pieces.Weights."""
        return Master(self._values[start:stop], self._rest[start:stop])


def weights_of(master: MasterKind, piece: TensorPiece, seed: int) -> Weights:
    """Return the master weights of a piece, whose memory has the dtype that optimizer.master asks for."""
    if master == "fp32":
        return Fp32(piece.weight)
    return ChanceWeights(piece, seed) if master == "bf16_chance" else KahanWeights(piece)


def places(piece: TensorPiece, start: int, count: int) -> Tensor:
    """Return where `count` values from position `start` of a piece lie in the whole tensor, flattened."""
    inside = torch.arange(piece.start + start, piece.start + start + count, device=piece.weight.device)
    if width := _width(piece):
        return inside // width * piece.spec.shape[1] + piece.slice * width + inside % width
    return inside + piece.slice * (piece.spec.size // piece.slices)


def _width(piece: TensorPiece) -> int:
    """Return the columns of a slice that was cut along columns. 0: it is none, and places follow each other."""
    return piece.spec.shape[1] // piece.slices if piece.slices > 1 and piece.spec.dim == 1 else 0


def chance(places: Tensor, seed: int, update: int, name: str) -> Tensor:
    """Return 16 random bits for each place in the tensor of this name: an int64 tensor."""
    return _mixed(_mixed(places & _LOW) ^ _key(seed, update, name)) >> 16


def _key(seed: int, update: int, name: str) -> int:
    """Return what the places of a tensor are mixed with, in 32 bits."""
    key = _mixed(seed & _LOW)
    for part in (seed >> 32, update, zlib.crc32(name.encode())):
        key = _mixed(key ^ (part & _LOW))
    return key


def _mixed(x: _Number) -> _Number:
    """Return a hash of 32-bit numbers, each in an int64. A tensor for one number would take the host some 0.1 ms."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = x ^ (x >> 16)
        # What passes 64 bits does not matter for the lower 32.
        x = (x * multiplier) & _LOW
    return x ^ (x >> 16)


def round_by_chance(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, away from zero with the probability of the part that is cut off, by 16 random bits
    for each."""
    return ((values.view(torch.int32) + bits.to(torch.int32)) & ~0xFFFF).view(torch.float32).bfloat16()
