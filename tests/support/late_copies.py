"""Copies between a GPU and its host that take their time, so that a read that waits for nothing shows."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sagetrain.engines.step import Engine


class _Stream:
    """The copies to the host that are under way, in their order. A copy is made when somebody waits for it."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, Tensor]] = deque()
        self._begun = 0

    def copy(self, values: Tensor) -> Tensor:
        """Return memory that gets these values later."""
        self._copies.append((torch.full_like(values, torch.nan), values.clone()))
        self._begun += 1
        return self._copies[-1][0]

    def record(self, event: Any = None) -> SimpleNamespace:
        """Return an event behind all copies that have begun. It stands for torch.cpu.Stream.record_event."""
        return SimpleNamespace(synchronize=partial(self._wait, self._begun))

    def _wait(self, number: int) -> None:
        while self._begun - len(self._copies) < number:
            target, values = self._copies.popleft()
            target.copy_(values)


@contextmanager
def played(engine: Engine) -> Iterator[None]:
    """Let an engine on the CPU, with state in the host's memory, copy its reduced gradients as from a GPU to pinned
    memory: the memory holds nan until the host waits for the copy."""
    if engine.settings.get("offload", "none") == "none":
        yield
        return
    for module in engine.model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params:
                parameter.pin_memory = True
    stream, copy = _Stream(), Tensor.to

    def to(self: Tensor, *place: Any, **how: Any) -> Tensor:
        # On the CPU FSDP's copies of weights to the device look the same, from another function.
        late = how.get("non_blocking") and sys._getframe(1).f_code.co_name == "foreach_reduce"
        return stream.copy(self) if late else copy(self, *place, **how)

    with patch.object(Tensor, "to", to), patch.object(torch.cpu.Stream, "record_event", stream.record, create=True):
        yield


@contextmanager
def late(engine: Engine, seed: int) -> Iterator[None]:
    """Let copies and collectives of an engine's steps begin late, by chance."""
    with busy(seed) if engine.device.type == "cuda" else played(engine):
        yield


@contextmanager
def busy(seed: int) -> Iterator[None]:
    """Let the GPU be busy before copies and collectives. Copies between the host and the GPU that nobody waits for
    begin late each time, and others by chance."""
    draw = random.Random(seed)

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **how: Any) -> Any:
            if how.get("non_blocking") or draw.random() < 0.1:
                torch.cuda._sleep(int(draw.uniform(0.1e-3, 0.5e-3) * 1.5e9))
            return function(*args, **how)

        return call

    late = [(Tensor, "to"), (Tensor, "copy_"), (torch, "_foreach_copy_")]
    late += [(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")]
    with ExitStack() as stack:
        for place, name in late:
            stack.enter_context(patch.object(place, name, behind(getattr(place, name))))
        yield
