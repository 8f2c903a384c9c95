"""The fp32 sums of gradients over the micro-steps of a step, and this rank's part of them for the update.

The sums differ in who keeps them, and all have these methods: `begin` a step, `expect` a backward pass, `add` what it
left, and `take` the sums for the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor


class ShardedSums:
    """The sums that FSDP keeps of reduced gradients, in the `grad` of its parameters.

    Args:
        parameters: FSDP's parameters by name.
        masters: this rank's rows of each parameter, by name.
    """

    def __init__(self, parameters: Mapping[str, Any], masters: Mapping[str, Tensor]) -> None:
        self._parameters, self._masters = parameters, masters

    def begin(self, micro_batches: int) -> None:
        """Begin the sums of a step of this many micro-batches."""

    def expect(self, reduced: bool) -> None:
        """Prepare for a backward pass. `reduced`: FSDP reduces gradients in this pass."""

    def add(self) -> None:
        """Add the gradients that a backward pass has left."""

    def take(self) -> dict[str, Tensor]:
        """Return this rank's part of the reduced sums by name, without the tensors that it keeps nothing of."""
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._masters[name].numel():
                found[name] = parameter.grad.to_local()
            parameter.grad = None
        return found


class HostSums(ShardedSums):
    """Sums in the host's memory (parallel.offload), which a thread of the CPU adds up while the GPU runs the next
    forward pass.

    The host's memory has the gradients when they are added. FSDP copies them to pinned memory without waiting, and only
    a backward pass that it is told is the last one waits for its copies. So every pass here is one
    (FsdpEngine._set_mode).

    FSDP would add them itself. Its copies from the GPU then go to fresh, pageable memory, and the backward pass waits
    for each copy and each sum. 3B on two H100s had 2,848 tokens/s with that and has 26,937 with this class
    (results/offload).
    """

    def __init__(self, parameters: Mapping[str, Any], masters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, masters)
        self._sums: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums of gradients")
        self._adding: Future[None] | None = None

    def expect(self, reduced: bool) -> None:
        """Wait until all gradients are added, so that the host holds no more than two sets of them."""
        if self._adding is not None:
            self._adding.result()
            self._adding = None

    def add(self) -> None:
        """Begin to add the gradients of a backward pass."""
        self._adding = self._thread.submit(self._add, super().take())

    def take(self) -> dict[str, Tensor]:
        """Return the sums: see ShardedSums."""
        self.expect(reduced=False)
        sums, self._sums = self._sums, {}
        return sums

    @torch.no_grad()
    def _add(self, gradients: dict[str, Tensor]) -> None:
        # Each gradient gives its memory back as soon as it is added. The last blocks of the model, which need memory
        # first in the next backward pass, come first.
        while gradients:
            name, gradient = gradients.popitem()
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient


class LeafSums(ShardedSums):
    """Sums that hooks of the tensors keep that autograd gives gradients to. FSDP keeps sums only in passes that go
    through the hooks of its modules.

    A gradient enters its sum, and is freed, as soon as autograd has made it. The last one leaves the sum in its place,
    in `.grad`, for FSDP to reduce.

    Args:
        leaves: the tensors that autograd gives gradients to, by name.
    """

    stay = False
    """If set, sums stay in the same memory for good. Otherwise FSDP frees the sums that it reduces."""

    def __init__(
        self, parameters: Mapping[str, Any], masters: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> None:
        super().__init__(parameters, masters)
        self.given: set[str] = set()
        """The names of the tensors that have had a gradient in this step."""
        self._leaves = leaves
        self._sums: dict[str, Tensor] = {}
        self._needed = self._last = False
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._add, name))

    @property
    def reduced_bytes(self) -> int:
        """The bytes of this rank's part of the reduced sums, which are beside sums that stay."""
        return sum(4 * master.numel() for master in self._masters.values())

    def begin(self, micro_batches: int) -> None:
        """Begin the sums of a step. FSDP reduces the gradients of an only micro-step where autograd puts them."""
        self._begin(needed=micro_batches > 1)

    def _begin(self, needed: bool) -> None:
        self.given.clear()
        self._needed = needed
        if not needed:
            return
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))
        for name, leaf in self._leaves.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(leaf, dtype=torch.float32)

    def expect(self, reduced: bool) -> None:
        """Prepare for a backward pass: see ShardedSums."""
        self._last = reduced

    def _add(self, name: str, leaf: Tensor) -> None:
        if not self._needed:
            return
        gradient, total = leaf.grad, self._sums[name]
        assert gradient is not None
        # Every micro-step is the same program, the first one as well.
        total.add_(gradient)
        self.given.add(name)
        if not self._last:
            leaf.grad = None
            return
        # A gradient with another dtype than its tensor can be handed over in no other way.
        gradient.data = total
        if not self.stay:
            del self._sums[name]


class OwnSums(LeafSums):
    """The sums of a single replica, which has nothing to reduce. FSDP would copy each of them twice."""

    stay = True

    def begin(self, micro_batches: int) -> None:
        """Begin the sums of a step: see ShardedSums."""
        self._begin(needed=True)

    def take(self) -> dict[str, Tensor]:
        """Return the sums by name. The next step writes into the same memory."""
        masters = self._masters.items()
        return {name: self._sums[name].to(master.dtype) for name, master in masters if name in self.given}
