"""The fp32 sums of gradients over the micro-steps of a step, kept by hooks of the tensors that autograd gives
gradients to. FSDP keeps such sums as well, but only in passes that go through the hooks of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor


class LeafSums:
    """The sums of one engine. A gradient enters its sum, and is freed, as soon as autograd has made it. The last one
    leaves the sum in its place, in `.grad`, for FSDP to reduce, or the engine reads the sums.

    Args:
        leaves: the tensors that autograd gives gradients to, by name.
        stay: see the attribute.
    """

    def __init__(self, leaves: Mapping[str, Tensor], stay: bool) -> None:
        self.stay = stay
        """If set, sums stay in the same memory for good. Otherwise FSDP frees the sums that it reduces."""
        self.last: bool = False
        """Whether the gradients to come are the last ones before FSDP reduces the sums."""
        self.given: set[str] = set()
        """The names of the tensors that have had a gradient in this step."""
        self._leaves = leaves
        self._sums: dict[str, Tensor] = {}
        self._needed = False
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._add, name))

    def begin(self, needed: bool) -> None:
        """Begin the sums of a step. Without a need for sums, gradients are left where autograd puts them: those of the
        only micro-step of a step, which FSDP reduces."""
        self.given.clear()
        self._needed = needed
        if not needed:
            return
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))
        for name, leaf in self._leaves.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(leaf, dtype=torch.float32)

    def sums(self) -> dict[str, Tensor]:
        """Return the step's sums by name. The next step writes into the same memory."""
        return {name: total for name, total in self._sums.items() if name in self.given}

    def _add(self, name: str, leaf: Tensor) -> None:
        if not self._needed:
            return
        gradient, total = leaf.grad, self._sums[name]
        assert gradient is not None
        # Every micro-step is the same program, the first one as well.
        total.add_(gradient)
        self.given.add(name)
        if not self.last:
            leaf.grad = None
            return
        # A gradient with another dtype than its tensor can be handed over in no other way.
        gradient.data = total
        if not self.stay:
            del self._sums[name]
