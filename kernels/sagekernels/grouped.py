"""The rows of a mixture of experts: which token's choice each row is, and moving tokens to rows and back.

T tokens choose k experts each. The T x k choices are rows, sorted by expert and, within an expert, by token. Rows are
tight: there is no padding between experts, nothing is dropped, and every shape follows from T, k and the room. The host
therefore never waits for the device to count. A table of tiles, TILE rows of one expert each, tells the kernels which
rows have which weights. A sum over choices has a fixed order, so results have the same bits always.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .casts import DTYPES
from .launch import ceil_div
from .operators import operator
from .refusals import refuse_transforms

TILE = 128
"""The number of rows of one expert that a program takes at a time. Transposed codes (grouped_casts.py) fill each
expert's last tile with zeros."""


class Rows(NamedTuple):
    """A plan of R rows for T tokens that choose k of E experts each. All tensors are on the device of
    the choices, and no shape depends on their values."""

    choice: Tensor
    """int32 [R]: the choice of each row, token * k + its place among the token's choices. -1: the row is empty. All
    empty rows are behind the last expert's."""
    slot: Tensor
    """int32 [T, k]: the row of each choice. -1: the choice has none, because its expert is not among these, or the room
    is used up."""
    ends: Tensor
    """int32 [E]: one past the last row of each expert. An expert's first row is where the one before it ends."""
    load: Tensor
    """int32 [E]: how many choices fell on each expert, also those for which there was no room."""
    tiles: Tensor
    """int32 [ceil(R / TILE) + E, 4]: expert, first row and end of each tile, and 0. A tile has the TILE rows from the
    first one on that are before the end, which is the end of the expert. Each expert has one tile at least. Tiles of
    expert -1 follow, which cover the empty rows."""
    first: Tensor
    """int32 [E + 1]: the first tile of each expert, and one past the last tile of the last one."""
    overflow: Tensor
    """bool []: whether the room was too small. Results are then those of the rows that had room, and are not to be
    used."""

    def tokens(self) -> Tensor:
        """Return the token of each row, int32 [R]; -1 where the row is empty."""
        return self.choice.div(self.slot.shape[1], rounding_mode="floor")


def plan_rows_twin(choices: Tensor, experts: int, room: int) -> Rows:
    """Compute plan_rows by torch's stable sort."""
    tokens, top = choices.shape
    key = choices.flatten().long()
    own = (key >= 0) & (key < experts)
    sorted_, order = torch.where(own, key, experts).sort(stable=True)
    ends = torch.searchsorted(sorted_, torch.arange(experts, device=key.device), right=True)
    load, total = ends.diff(prepend=ends.new_zeros(1)), ends[-1]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=key.device))
    slot = torch.where(own & (place < room), place, -1).view(tokens, top)
    row = torch.arange(room, device=key.device)
    order = torch.cat((order, order.new_full((max(0, room - len(order)),), -1)))[:room]
    choice = torch.where(row < total, order, -1)
    table = tiles_twin(ends.clamp(max=room), room)
    return Rows(choice.int(), slot.int(), ends.clamp(max=room).int(), load.int(), *table, total > room)


def tiles_twin(ends: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return `tiles` and `first` of Rows for experts whose rows end there."""
    experts, ends = len(ends), ends.long()
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    many = ((ends - starts + TILE - 1) // TILE).clamp(min=1)
    first = torch.cat((many.new_zeros(1), many.cumsum(0)))
    tile = torch.arange(most_tiles(room, experts), device=ends.device)
    expert = torch.searchsorted(first[1:], tile, right=True)
    begin = torch.cat((starts, ends[-1:]))[expert] + (tile - first[expert]) * TILE
    end = torch.cat((ends, ends.new_full((1,), room)))[expert]
    expert = torch.where(expert < experts, expert, -1)
    return torch.stack((expert, begin, end, torch.zeros_like(tile)), 1).int(), first.int()


def most_tiles(room: int, experts: int) -> int:
    """Return how many tiles there can be, those of the empty rows included."""
    return ceil_div(room, TILE) + experts


def gather_twin(x: Tensor, choice: Tensor, top: int) -> Tensor:
    """Return the token of each row, and zeros where the row is empty."""
    token = choice.div(top, rounding_mode="floor").long()
    if not len(x):
        return x.new_zeros(len(choice), x.shape[1])
    return x[token.clamp(min=0)].masked_fill_((token < 0)[:, None], 0)


def combine_twin(y: Tensor, slot: Tensor) -> Tensor:
    """Return the sum of each token's rows, one choice after the other in float32, rounded once."""
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(len(slot), y.shape[1], dtype=wide, device=y.device)
    for row in slot.long().unbind(1):
        total += gather_twin(y, row, 1).to(wide)
    return total.to(y.dtype)


_Planned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _plan_rows(choices: Tensor, experts: int, room: int) -> _Planned:
    return tuple(plan_rows_twin(choices, experts, room))


def _plan_rows_fake(choices: Tensor, experts: int, room: int) -> _Planned:
    shapes = (room,), choices.shape, (experts,), (experts,), (most_tiles(room, experts), 4), (experts + 1,)
    whole = [choices.new_empty(shape, dtype=torch.int32) for shape in shapes]
    return *whole, choices.new_empty((), dtype=torch.bool)


PLAN_ROWS = operator(_plan_rows, _plan_rows_fake)


def _gather_rows(x: Tensor, choice: Tensor, top: int) -> Tensor:
    return gather_twin(x, choice, top)


def _gather_rows_fake(x: Tensor, choice: Tensor, top: int) -> Tensor:
    return x.new_empty(choice.shape[0], x.shape[1])


GATHER_ROWS = operator(_gather_rows, _gather_rows_fake)


def _combine_rows(y: Tensor, slot: Tensor) -> Tensor:
    return combine_twin(y, slot)


def _combine_rows_fake(y: Tensor, slot: Tensor) -> Tensor:
    return y.new_empty(slot.shape[0], y.shape[1])


COMBINE_ROWS = operator(_combine_rows, _combine_rows_fake)


def plan_rows(choices: Tensor, experts: int, room: int | None = None) -> Rows:
    """Sort the choices of tokens by expert, stably, on the device and without a wait of the host.

    Args:
        choices: int64 or int32 [T, k], the experts of each token, all different. A number outside of 0 .. experts - 1
            is an expert of another rank: that choice has no row.
        experts: E, how many experts there are.
        room: R, the number of rows that there is memory for (default: T k, which always suffices).

    Raises:
        TypeError: choices are not int64 or int32.
        ValueError: choices are no matrix, or experts or room are too small.
    """
    if choices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"plan_rows takes choices in int64 or int32, got {choices.dtype}")
    if choices.dim() != 2 or choices.shape[1] < 1:
        raise ValueError(f"plan_rows takes choices [tokens, experts of a token], got shape {tuple(choices.shape)}")
    room = choices.shape[0] * choices.shape[1] if room is None else room
    if experts < 1 or room < 0:
        raise ValueError(f"plan_rows takes one expert and no row at least, got experts {experts} and room {room}")
    return Rows(*PLAN_ROWS(choices, experts, room))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choice: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(choice, slot)
        return GATHER_ROWS(x, choice, slot.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        choice, slot = ctx.saved_tensors
        return _Combine.apply(grad, choice, slot), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, choice: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(choice, slot)
        return COMBINE_ROWS(y, slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        choice, slot = ctx.saved_tensors
        return _Gather.apply(grad, choice, slot), None, None


def gather(x: Tensor, rows: Rows) -> Tensor:
    """Return the token of each row: [T, H] -> [R, H]. Empty rows are zeros. The gradient is that of `combine`.

    Args:
        x: bf16, fp16, fp32 or fp64, any strides.

    Raises:
        TypeError: x has another dtype.
        ValueError: x is no matrix of T tokens.
        NotImplementedError: a transform of torch.func.
    """
    _check("gather", x, len(rows.slot), "tokens")
    return _Gather.apply(x, rows.choice, rows.slot)


def combine(y: Tensor, rows: Rows) -> Tensor:
    """Return the sum of each token's rows: [R, H] -> [T, H]. It is added up choice by choice in float32 and rounded
    once. Choices without a row add nothing. The gradient is that of `gather`.

    Args:
        y: bf16, fp16, fp32 or fp64, any strides.

    Raises:
        TypeError: y has another dtype.
        ValueError: y is no matrix of R rows.
        NotImplementedError: a transform of torch.func.
    """
    _check("combine", y, len(rows.choice), "rows")
    return _Combine.apply(y, rows.choice, rows.slot)


def _check(name: str, x: Tensor, length: int, what: str) -> None:
    refuse_transforms(name, "indexing by Rows.tokens()")
    if x.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{name} takes bf16, fp16, fp32 or fp64, got {x.dtype}")
    if x.dim() != 2 or len(x) != length:
        raise ValueError(f"{name} takes a matrix of {length} {what}, got shape {tuple(x.shape)}")
