"""The fp32 sums of gradients over the micro-steps of a step, and this rank's part of them for the update.

The sums differ in who keeps them, and all have these methods: `begin` a step, `expect` a backward pass, `add` what it
left, and `take` the sums for the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sagekernels.sums import add_to
from sagetrain.engines.reduction import Reduction


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

    def expect(self, last: bool, ended: Collection[Any] = ()) -> None:
        """Prepare for a backward pass, which may be the last one of a step.

        Args:
            ended: the blocks that have their last pass, if others have not. Such a pass goes through a chunk of a
                pipeline stage, and others follow through its other chunks.
        """

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
    (Hooks.expect).

    FSDP would add them itself. Its copies from the GPU then go to fresh, pageable memory, and the backward pass waits
    for each copy and each sum. 3B on two H100s had 2,848 tokens/s with that and has 26,937 with this class
    (results/offload).
    """

    def __init__(self, parameters: Mapping[str, Any], masters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, masters)
        self._sums: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums of gradients")
        self._adding: Future[None] | None = None

    def expect(self, last: bool, ended: Collection[Any] = ()) -> None:
        """Wait until all gradients are added, so that the host holds no more than two sets of them."""
        if self._adding is not None:
            self._adding.result()
            self._adding = None

    def add(self) -> None:
        """Begin to add the gradients of a backward pass."""
        self._adding = self._thread.submit(self._add, super().take())

    def take(self) -> dict[str, Tensor]:
        """Return the sums: see ShardedSums."""
        self.expect(last=True)
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

    A gradient enters its sum, and is freed, as soon as autograd has made it. In the last pass of a step the sums of
    a unit are reduced as soon as they are complete. A reduction that adds means up takes the gradients of every pass as
    they are, and no rank has sums of whole tensors.

    Args:
        leaves: the tensors that autograd gives gradients to, by name.
        reduction: the reduction over replicas. None: a single replica has nothing to reduce.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        masters: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor],
        reduction: Reduction | None,
    ) -> None:
        super().__init__(parameters, masters)
        self.stays = False
        """If set, sums and means stay in the same memory for good. Otherwise a sum is freed when it is packed."""
        self.given: set[str] = set()
        """The names of the tensors that have had a gradient in this step."""
        self.needed = False
        """If set, there are sums in this step. The gradients of an only micro-step are reduced as they are."""
        self._leaves, self._reduction = leaves, reduction
        self._sums: dict[str, Tensor] = {}
        parts = reduction.units if reduction else []
        self._unit_of = {name: number for number, unit in enumerate(parts) for name in unit.names}
        self._now: Reduction | None = None
        self._awaited: dict[int, set[str]] = {}
        self._early: set[int] = set()
        """The units that were reduced before the last pass of this step."""
        # The garbage collector does not see these hooks, which would keep sums and weights for good.
        own = weakref.proxy(self)
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(LeafSums._add, own, name))

    @property
    def reduces(self) -> bool:
        """Whether the last pass of a step reduces, and others do not."""
        return self._reduction is not None and not self._reduction.adds

    @property
    def reduced_bytes(self) -> int:
        """The bytes of the means, which are beside the sums if these stay."""
        return sum(4 * master.numel() for master in self._masters.values()) if self.reduces else 0

    def stay(self) -> None:
        """Leave sums and means in the same memory from now on."""
        self.stays = True
        leaf = next(iter(self._leaves.values()))
        # The kernel is compiled now.
        add_to(leaf.new_zeros(16, dtype=torch.float32), leaf.new_zeros(16))
        if self._reduction:
            self._reduction.allocate_all()

    def begin(self, micro_batches: int) -> None:
        """Begin the sums of a step: see ShardedSums."""
        self.given.clear()
        self._early.clear()
        self.needed = self._reduction is None or (self.reduces and micro_batches > 1)
        if self._reduction and not self.stays:
            self._reduction.free()
        if self._reduction and self._reduction.adds:
            self._reduction.clear()
        if not self.needed:
            return
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))
        for name, leaf in self._leaves.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(leaf, dtype=torch.float32)

    def expect(self, last: bool, ended: Collection[Any] = ()) -> None:
        """Prepare for a backward pass: see ShardedSums."""
        self._now = self._reduction if last or ended or not self.reduces else None
        self._awaited, self._finishes = {}, last or not ended
        if self._now:
            if not self._early:
                self._now.begin()
            for number, unit in enumerate(self._now.units):
                if number not in self._early and (self._finishes or unit.module in ended):
                    self._awaited[number] = set(unit.names)

    def _add(self, name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.given.add(name)
        if self.needed:
            # Every micro-step is the same program, the first one as well.
            total = self._sums[name]
            if self.stays:
                add_to(total, leaf.grad)  # Replays take it, and the host has no time for it.
            else:
                total.add_(leaf.grad)
            leaf.grad = None
        if self._now and (awaited := self._awaited.get(number := self._unit_of[name])):
            awaited.discard(name)
            if not awaited:
                self._reduce(number, self._now)

    def _reduce(self, number: int, reduction: Reduction) -> None:
        del self._awaited[number]
        if not self._finishes:
            self._early.add(number)
        names = reduction.units[number].names
        if self.needed:
            reduction.start(number, [self._sums[name] for name in names])
            for name in names if not self.stays else ():
                del self._sums[name]
            return
        leaves = [self._leaves[name] for name in names]
        reduction.start(number, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None

    def add(self) -> None:
        """Reduce the units that lack the gradient of a tensor, and wait for all unless other passes follow."""
        if self._now:
            for number in list(self._awaited):
                self._reduce(number, self._now)
            if self._finishes:
                self._early.clear()
                self._now.finish()

    def take(self) -> dict[str, Tensor]:
        """Return this rank's part of the sums by name: see ShardedSums. The next step writes into the same memory."""
        if self._reduction:
            means = self._reduction.means()
            return {name: means[name] for name in self._parameters if name in self.given and means[name].numel()}
        masters = self._masters.items()
        return {name: self._sums[name].to(master.dtype) for name, master in masters if name in self.given}
