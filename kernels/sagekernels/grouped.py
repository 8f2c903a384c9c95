"""The rows of a mixture of experts: which token's choice each row is, and moving tokens to rows and back.

T tokens choose k experts each. The T x k choices are rows, sorted by expert and, within an expert, by token. Rows are
tight: there is no padding between experts, nothing is dropped, and every shape follows from T, k and the room. The host
therefore never waits for the device to count. A table of tiles, TILE rows of one expert each, tells the kernels which
rows have which weights. A sum over choices has a fixed order, so results have the same bits always.
"""

from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from .casts import DTYPES
from .launch import ceil_div, on_device_of
from .operators import by_device, operator
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


class Moves(Protocol):
    """The choices of rows and the rows of choices, as in Rows, but with empty rows anywhere."""

    @property
    def choice(self) -> Tensor: ...

    @property
    def slot(self) -> Tensor: ...


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


PLAN_TOKENS, PLAN_WARPS, PLAN_BLOCKS = 16, 4, 1024
"""The tokens of a program that counts or places choices, and how many such counts are added up at a time."""
COLUMNS, WARPS = 4096, 4
"""The largest part of a row that a program moves at a time."""


@triton.jit
def _expert_of(CHOICES, token, tokens, place, experts, TOP: tl.constexpr):
    """Load the expert of each token at one place among its choices; -1 where it is none of these."""
    found = tl.load(CHOICES + token.to(tl.int64) * TOP + place, mask=token < tokens, other=-1)
    return tl.where((found >= 0) & (found < experts), found, -1).to(tl.int32)


@triton.jit
def _count_kernel(
    CHOICES, COUNTS, tokens, experts, TOP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Count the choices of each expert among TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, PADDED)
    chosen = tl.zeros([TOKENS, PADDED], tl.int32)
    for place in tl.static_range(TOP):
        mine = _expert_of(CHOICES, token, tokens, place, experts, TOP)
        chosen += (expert[None, :] == mine[:, None]).to(tl.int32)
    tl.store(COUNTS + tl.program_id(0) * experts + expert, tl.sum(chosen, 0), mask=expert < experts)


@triton.jit
def _sum_kernel(COUNTS, LOAD, blocks, experts, BLOCKS: tl.constexpr):
    """Replace the counts of one expert by the sums of those before, and write their total. torch's sum along columns
    takes 0.18 ms of Qwen3-30B-A3B's layer."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for base in range(0, blocks, BLOCKS):
        block = base + tl.arange(0, BLOCKS)
        count = tl.load(COUNTS + block * experts + expert, mask=block < blocks, other=0)
        tl.store(COUNTS + block * experts + expert, total + tl.cumsum(count, 0) - count, mask=block < blocks)
        total += tl.sum(count, 0)
    tl.store(LOAD + expert, total)


@triton.jit
def _place_kernel(
    CHOICES, BEFORE, LOAD, ENDS, SLOT, CHOICE, tokens, experts, room,
    TOP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Give each choice its row. BEFORE has the choices of each expert among the tokens of the blocks before, LOAD
    those of all, and ENDS the row behind the last one."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, PADDED)
    chosen = tl.zeros([TOKENS, PADDED], tl.int32)
    for place in tl.static_range(TOP):
        mine = _expert_of(CHOICES, token, tokens, place, experts, TOP)
        chosen += (expert[None, :] == mine[:, None]).to(tl.int32)
    within = expert < experts
    base = tl.load(BEFORE + tl.program_id(0) * experts + expert, mask=within, other=0)
    base += tl.load(ENDS + expert, mask=within, other=0) - tl.load(LOAD + expert, mask=within, other=0)
    free = base[None, :] + tl.cumsum(chosen, 0) - chosen
    for place in tl.static_range(TOP):
        mine = _expert_of(CHOICES, token, tokens, place, experts, TOP)
        here = expert[None, :] == mine[:, None]
        row = tl.sum(tl.where(here, free, 0), 1)
        free += here.to(tl.int32)
        row = tl.where((mine >= 0) & (row < room), row, -1)
        of_choice = token.to(tl.int64) * TOP + place
        tl.store(SLOT + of_choice, row, mask=token < tokens)
        tl.store(CHOICE + row, of_choice.to(tl.int32), mask=(token < tokens) & (row >= 0))


@triton.jit
def _tiles_kernel(
    ENDS, TILES, FIRST, experts, room, most, PADDED: tl.constexpr, TILE: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Write the tiles of one expert per program, and in the last program those of the empty rows."""
    mine = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    ends = tl.load(ENDS + expert, mask=expert < experts, other=0)
    starts = tl.load(ENDS + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.where(expert < experts, tl.maximum((ends - starts + TILE - 1) // TILE, 1), 0)
    before = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    tl.store(FIRST + mine, before)
    start = tl.load(ENDS + mine - 1, mask=mine > 0, other=0)
    end = tl.load(ENDS + mine, mask=mine < experts, other=0)
    after = tl.where(mine < experts, before + tl.maximum((end - start + TILE - 1) // TILE, 1), most)
    end = tl.where(mine < experts, end, room)
    name = tl.where(mine < experts, mine, -1)
    for base in range(before, after, TABLE):
        tile = base + tl.arange(0, TABLE)
        at, inside = TILES + 4 * tile, tile < after
        tl.store(at, tl.zeros([TABLE], tl.int32) + name, mask=inside)
        tl.store(at + 1, start + (tile - before) * TILE, mask=inside)
        tl.store(at + 2, tl.zeros([TABLE], tl.int32) + end, mask=inside)
        tl.store(at + 3, tl.zeros([TABLE], tl.int32), mask=inside)


def plan_rows_triton(choices: Tensor, experts: int, room: int) -> Rows:
    """Compute plan_rows_twin on a GPU by a counting sort: counts of each few tokens, their sums, and then places."""
    (tokens, top), device = choices.shape, choices.device
    choices, blocks = choices.contiguous(), ceil_div(tokens, PLAN_TOKENS)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    load = torch.empty(experts, dtype=torch.int32, device=device)
    slot = torch.empty(tokens, top, dtype=torch.int32, device=device)
    choice = torch.full((room,), -1, dtype=torch.int32, device=device)
    how = {"TOP": top, "PADDED": triton.next_power_of_2(experts), "TOKENS": PLAN_TOKENS, "num_warps": PLAN_WARPS}
    with on_device_of(choices):
        if tokens:
            _count_kernel[(blocks,)](choices, counts, tokens, experts, **how)
        _sum_kernel[(experts,)](counts, load, blocks, experts, BLOCKS=PLAN_BLOCKS, num_warps=PLAN_WARPS)
        ends = load.cumsum(0, dtype=torch.int32)
        if tokens:
            _place_kernel[(blocks,)](choices, counts, load, ends, slot, choice, tokens, experts, room, **how)
        within, most = ends.clamp(max=room), most_tiles(room, experts)
        tiles = torch.empty(most, 4, dtype=torch.int32, device=device)
        first = torch.empty(experts + 1, dtype=torch.int32, device=device)
        _tiles_kernel[(experts + 1,)](
            within, tiles, first, experts, room, most, PADDED=how["PADDED"], TILE=TILE, TABLE=32, num_warps=1
        )
    return Rows(choice, slot, within, load, tiles, first, ends[-1] > room)


@triton.jit
def _gather_kernel(X, CHOICE, OUT, columns, stride, TOP: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the token of one row, or zeros, COLUMNS numbers of it."""
    row = tl.program_id(0)
    choice = tl.load(CHOICE + row)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = (choice // TOP).to(tl.int64)
    x = tl.load(X + token * stride + column, mask=(column < columns) & (choice >= 0), other=0.0)
    tl.store(OUT + row.to(tl.int64) * columns + column, x, mask=column < columns)


@triton.jit
def _combine_kernel(Y, SLOT, OUT, columns, stride, TOP: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the rows of one token, COLUMNS numbers of them."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(TOP):
        row = tl.load(SLOT + token * TOP + place).to(tl.int64)
        y = tl.load(Y + row * stride + column, mask=(column < columns) & (row >= 0), other=0.0)
        total += y.to(tl.float32)
    tl.store(OUT + token * columns + column, total.to(OUT.dtype.element_ty), mask=column < columns)


def _move(kernel: triton.JITFunction, x: Tensor, where: Tensor, length: int, top: int) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    columns = x.shape[1]
    out = x.new_empty(length, columns)
    if out.numel():
        block = min(triton.next_power_of_2(columns), COLUMNS)
        with on_device_of(x):
            kernel[(length, ceil_div(columns, block))](
                x, where, out, columns, x.stride(0), TOP=top, COLUMNS=block, num_warps=WARPS
            )
    return out


def gather_triton(x: Tensor, choice: Tensor, top: int) -> Tensor:
    """Compute gather_twin on a GPU."""
    return _move(_gather_kernel, x, choice, len(choice), top)


def combine_triton(y: Tensor, slot: Tensor) -> Tensor:
    """Compute combine_twin on a GPU, bit for bit."""
    return _move(_combine_kernel, y, slot, len(slot), slot.shape[1])


_Planned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _plan_rows(choices: Tensor, experts: int, room: int) -> _Planned:
    return tuple((plan_rows_triton if choices.is_cuda else plan_rows_twin)(choices, experts, room))


def _plan_rows_fake(choices: Tensor, experts: int, room: int) -> _Planned:
    shapes = (room,), choices.shape, (experts,), (experts,), (most_tiles(room, experts), 4), (experts + 1,)
    whole = [choices.new_empty(shape, dtype=torch.int32) for shape in shapes]
    return *whole, choices.new_empty((), dtype=torch.bool)


PLAN_ROWS = operator(_plan_rows, _plan_rows_fake)


GATHER_ROWS = by_device(
    "gather_rows", gather_twin, gather_triton, lambda x, choice, top: x.new_empty(choice.shape[0], x.shape[1])
)
COMBINE_ROWS = by_device(
    "combine_rows", combine_twin, combine_triton, lambda y, slot: y.new_empty(slot.shape[0], y.shape[1])
)


def plan_rows(choices: Tensor, experts: int, room: int | None = None) -> Rows:
    """Sort the choices of tokens by expert, stably, on the device and without a wait of the host.

    Args:
        choices: int64 or int32 [T, k], the experts of each token, which may repeat. A number outside of
            0 .. experts - 1 is an expert of another rank: that choice has no row.
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


class _Moved(torch.autograd.Function):
    """Tokens to rows, or the sums of rows to tokens. Each way is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, choice: Tensor, slot: Tensor, gathers: bool) -> Tensor:
        ctx.save_for_backward(choice, slot)
        ctx.gathers = gathers
        return GATHER_ROWS(x, choice, slot.shape[1]) if gathers else COMBINE_ROWS(x, slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Moved.apply(grad, *ctx.saved_tensors, not ctx.gathers), None, None, None


def gather(x: Tensor, rows: Moves) -> Tensor:
    """Return the token of each row: [T, H] -> [R, H]. Empty rows are zeros. The gradient is that of `combine`.

    Args:
        x: bf16, fp16, fp32 or fp64, any strides.

    Raises:
        TypeError: x has another dtype.
        ValueError: x is no matrix of T tokens.
        NotImplementedError: a transform of torch.func.
    """
    _check("gather", x, len(rows.slot), "tokens")
    return _Moved.apply(x, rows.choice, rows.slot, True)


def combine(y: Tensor, rows: Moves) -> Tensor:
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
    return _Moved.apply(y, rows.choice, rows.slot, False)


def _check(name: str, x: Tensor, length: int, what: str) -> None:
    refuse_transforms(name, "indexing by Rows.tokens()")
    if x.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{name} takes bf16, fp16, fp32 or fp64, got {x.dtype}")
    if x.dim() != 2 or len(x) != length:
        raise ValueError(f"{name} takes a matrix of {length} {what}, got shape {tuple(x.shape)}")
