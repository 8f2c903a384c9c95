"""Exchange Python objects between all ranks, or those of a group. A process without a process group is the only
rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return the number of this rank and that of all ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def of_rank_0(value: T, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> T:
    """Return the value of rank 0 on every rank; collective. `device` is the one on which the value travels, if it is
    not the group's own."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=group, device=device)
    return box[0]


def refused(group: dist.ProcessGroup, step: Callable[..., None], *arguments: object) -> str:
    """Take a step on all ranks of a group; collective. Return the complaint of the first rank where it failed, or an
    empty string."""
    try:
        step(*arguments)
        complaint = ""
    except Exception as error:  # noqa: BLE001 - the ranks agree after any error
        complaint = f"rank {group.rank()}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return next(filter(None, of_every_rank(complaint, group)), "")
