"""The fp32 sums of gradients over the micro-steps of a step, kept by hooks of the tensors that autograd gives
gradients to. FSDP keeps such sums as well, but only in passes that go through the hooks of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor


class LeafSums:
    """The sums of one engine. A gradient enters its sum, and is freed, as soon as autograd has made it. The first one
    becomes the sum. The last one leaves the sum in its place, in `.grad`, for FSDP to reduce, or the engine takes the
    sums.

    Args:
        leaves: the tensors that autograd gives gradients to, by name.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.last: bool = False
        """Whether the gradients to come are the last ones before FSDP reduces the sums."""
        self._sums: dict[str, Tensor] = {}
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._add, name))

    def take(self) -> dict[str, Tensor]:
        """Return all sums by name, and begin anew."""
        sums, self._sums = self._sums, {}
        return sums

    def _add(self, name: str, leaf: Tensor) -> None:
        gradient, total = leaf.grad, self._sums.pop(name, None)
        assert gradient is not None
        if total is not None:
            total.add_(gradient)
        if not self.last:
            self._sums[name] = gradient.to(torch.float32) if total is None else total
            leaf.grad = None
        elif total is not None:
            # A gradient with another dtype than its tensor can be handed over in no other way.
            gradient.data = total
