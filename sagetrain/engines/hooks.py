"""The settings of FSDP's hooks for the next backward pass of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.distributed.fsdp import FSDPModule

from sagetrain.config.layout import Layout
from sagetrain.engines.sharding import Unit
from sagetrain.model.transformer import Transformer


class Hooks:
    """The hooks of a model to which fully_shard was applied.

    Args:
        to_host: whether every pass waits for its copies of gradients to the host.
        parts: the units of the model.
    """

    def __init__(self, model: Transformer, layout: Layout, to_host: bool, parts: Sequence[Unit]) -> None:
        self._model, self._root, self._to_host = model, cast(FSDPModule, model), to_host
        self._stay = self._root, *(unit.module for unit in parts if unit.apart)
        # The outermost unit has tensors of all chunks, and that of the routers, the wide one, of several.
        self._of_chunks = self._root, *(unit.module for unit in parts if unit.wide)
        self._stage, self._resident = layout.zero_stage, layout.hooks == "never"
        self._mode: tuple[bool, bool] | None = None

    def rest(self) -> None:
        """Prepare for backward passes whose gradients are for nobody else."""
        self._set(reduce=False, last=False)

    def expect(self, last: bool, ended: Sequence[FSDPModule] = (), only: bool = False) -> None:
        """Prepare for a backward pass, which may be the last one of a step.

        Args:
            ended: the blocks that have their last pass, if others have not (ShardedSums.expect).
            only: the step has a single micro-batch.
        """
        if self._resident:
            return
        self._set(last or self._stage > 1, last)
        for block in ended:
            block.set_requires_gradient_sync(True, recurse=False)
            block.set_requires_all_reduce(True, recurse=False)
            block.set_reshard_after_backward(True, recurse=False)
            self._mode = None
        if ended and only:
            # FSDP reduces no unit's sums in fp32, from other chunks, beside new gradients in training.dtype.
            self._root.set_requires_gradient_sync(True, recurse=False)

    def _set(self, reduce: bool, last: bool) -> None:
        if (reduce, last) == self._mode:
            return
        self._mode, root = (reduce, last), self._root
        root.set_requires_gradient_sync(reduce)
        # Between the copies of shards, sums travel once a step. FSDP holds back a unit's sums as one vector, and each
        # chunk gives gradients to other tensors of some units, whose sums therefore travel after every pass.
        root.set_requires_all_reduce(last)
        for module in self._of_chunks:
            module.set_requires_all_reduce(last or len(self._model.chunks) > 1, recurse=False)
        # After its last pass FSDP forgets the order of passes, and waits for its copies to the host.
        root.set_is_last_backward(last or self._to_host or self._resident)
        root.set_reshard_after_backward(not self._resident and (last or self._stage == 3))
        for module in () if last else self._stay:
            # These units are needed from the begin of a pass to its end, so giving them back saves no memory. In a
            # pipeline it would take them away from the micro-batches that are under way.
            module.set_reshard_after_backward(False, recurse=False)
