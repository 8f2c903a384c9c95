"""The line between a rank and its keeper (keeper.py): what the rank knows, and what it tells. Without a keeper nothing
is told.

The keeper hands a rank an environment variable with everything that it knows. The rank writes lines of JSON into a
pipe: the step that begins, and in the end the error. This module does not import torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

KEEPER = "SAGETRAIN_KEEPER"
"""The environment variable in which a keeper hands its rank a Lifeline."""


@dataclass(frozen=True)
class Death:
    """The reason why the ranks of a generation ended, which all keepers agree on."""

    rank: int
    host: str
    code: int
    """The exit code of the rank; negative: the number of the signal that killed it."""
    why: str
    """The error or the signal, in words."""
    step: int
    """The step that the rank was in; 0: it had not begun one."""
    time: float
    """The time of death in seconds since 1970, by the clock of that host."""
    again: bool
    """Whether another attempt may help."""
    memory: bool = False
    """Whether a device was out of memory."""
    generation: int = 0
    found: float = 0.0
    """The time at which the keeper of this rank learned of the death."""
    down: float = 0.0
    """The time at which the ranks of all keepers had ended."""
    lost: bool = False
    """Whether nothing is known but that the host is lost."""

    @property
    def said(self) -> str:
        """The death in words."""
        if self.lost:
            return f"host {self.host} of rank {self.rank} was lost ({self.why})"
        where = f"in step {self.step}" if self.step else "before its first step"
        return f"rank {self.rank} on {self.host} died {where} ({self.why})"

    def seen(self, found: float, down: float) -> Death:
        """Return the death with the times of this keeper."""
        return replace(self, found=found, down=down)


@dataclass(frozen=True)
class Lifeline:
    """The connection of a rank to its keeper."""

    keeper: int
    """The process id of the keeper."""
    pipe: int
    """The file descriptor of the pipe to it."""
    generation: int
    """The number of times that all ranks have begun before."""
    death: Death | None
    """The reason for this generation; None: it is the first one."""

    def to_env(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))


@cache
def _read(text: str | None) -> Lifeline | None:
    if not text:
        return None
    found = json.loads(text)
    return Lifeline(**{**found, "death": found["death"] and Death(**found["death"])})


def lifeline() -> Lifeline | None:
    """Return the lifeline of this process; None if the process is not the rank of a keeper. A program that the rank
    starts inherits the variable, and is none."""
    found = _read(os.environ.get(KEEPER))
    return found if found and found.keeper == os.getppid() else None


def death() -> Death | None:
    """Return the death that this generation of ranks follows."""
    own = lifeline()
    return own.death if own else None


def generation() -> int:
    """Return the number of times that all ranks have begun before this one, by the keeper's count."""
    own = lifeline()
    return own.generation if own else 0


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends, which has this process id."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    # The parent may have ended before.
    if os.getppid() != parent:
        os._exit(1)


def read_words(line: bytes) -> dict[str, Any]:
    """Return what a rank has told by a line. A rank that was killed may leave a part of one, which tells nothing."""
    with suppress(ValueError):
        return dict(json.loads(line))
    return {}


def tell(words: Mapping[str, Any]) -> None:
    """Tell the keeper something, if there is one. A keeper that does not listen is not waited for."""
    if own := lifeline():
        with suppress(OSError):
            os.write(own.pipe, json.dumps(dict(words)).encode() + b"\n")


def last_words(error: BaseException) -> None:
    """Tell the keeper the error that ends this rank."""
    # A pipe takes this many bytes at once or not at all.
    why = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
    tell({"why": why, "memory": _is_out_of_memory(error)})


def _is_out_of_memory(error: BaseException | None) -> bool:
    torch = sys.modules.get("torch")
    kinds = (MemoryError, *((torch.OutOfMemoryError,) if torch else ()))
    return error is not None and (isinstance(error, kinds) or _is_out_of_memory(error.__cause__))
