"""The whole weights of a tensor-parallel rank, with which a model computes: gathered for each pass, or resident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sagetrain.engines.kept_weights import KeptWeights
from sagetrain.engines.passing_blocks import PassingBlocks
from sagetrain.engines.sharding import Unit
from sagetrain.engines.whole_weights import WholeWeights
from sagetrain.model.transformer import Transformer, changed


class GatheredWeights:
    """Weights that FSDP's hooks gather for the passes of a model.

    Args:
        gathered: the tensors that the model computes with, by name, for each unit (sharding.gather_once).
        kept: the 8-bit weights that blocks keep from one update to the next. None: they keep none.
    """

    def __init__(
        self,
        model: Transformer,
        units: Sequence[Unit],
        gathered: Sequence[Mapping[str, Tensor]],
        kept: KeptWeights | None,
    ) -> None:
        self._model, self._modules, self._kept = model, [unit.module for unit in units], kept
        self._apart = [unit.module for unit in units if unit.apart]
        leaves = {name: leaf for group in gathered for name, leaf in group.items()}
        self.leaves = {name: leaves[name] for name in model.specs}
        """The tensors that receive gradients from autograd, by name."""
        for module in self._modules:
            # FSDP's own hook comes first and has gathered the weights.
            module.register_forward_pre_hook(lambda module, inputs: self._enter(module))
        if self._apart:
            model.register_forward_pre_hook(lambda module, inputs: self._enter_apart())
        self.written()

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model."""
        return self._model(**inputs)

    def written(self) -> None:
        """Note that masters were written: every block renews its 8-bit weights in its next forward pass, once for all
        micro-batches of a step."""
        self._stale: dict[nn.Module, int] = {module: number for number, module in enumerate(self._modules)}

    def reload(self) -> None:
        """Renew all that depends on the masters, which were changed outside of a step: the next pass gathers them."""
        for module in self._modules:
            module.reshard()
        self.written()

    def gather(self) -> None:
        """Gather all weights, and make all of them ready for a forward pass."""
        self._enter_apart()
        for module in self._modules:
            module.unshard()
            self._enter(module)

    def _enter_apart(self) -> None:
        """Gather the weights of modules that are never called. Blocks read them, and so come later."""
        for module in self._apart:
            module.unshard()
            self._enter(module)

    def _enter(self, module: nn.Module) -> None:
        """Make the weights of a module ready for its forward pass."""
        number = self._stale.pop(module, None)
        if number is None:
            return
        self._wait(number)
        if self._kept is None or module in self._apart:  # Its block renews what experts keep.
            return
        if module is not self._model:
            self._kept.renew(module)
        elif self._model.matmuls[-1]:  # The output projection belongs to the outermost unit.
            self._kept.renew(self._model.head)

    def _wait(self, number: int) -> None:
        """Let the current stream wait for the weights of the unit with this number."""


class ResidentWeights(GatheredWeights):
    """Weights that stay whole, and are renewed right after each update. No pass needs FSDP's hooks, whose time on the
    host is a quarter of a micro-step's.

    Args:
        masters: this rank's rows of each weight, by name.
        stay: the number of units that stay whole, from the outermost one on (default: all).
    """

    def __init__(
        self,
        model: Transformer,
        units: Sequence[Unit],
        gathered: Sequence[Mapping[str, Tensor]],
        kept: KeptWeights | None,
        masters: Mapping[str, Tensor],
        stay: int | None = None,
    ) -> None:
        self._whole = WholeWeights(gathered[:stay], masters, [unit.ranks.shards for unit in units[:stay]])
        super().__init__(model, units, gathered, kept)

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model: see GatheredWeights."""
        self._enter(self._model)
        for module in self._apart:
            self._enter(module)
        with changed({(self._model, "without_hooks"): self._call}):
            return self._model.forward(**inputs)

    def _call(self, block: nn.Module, *inputs: Any) -> Any:
        """Call a block without its hooks."""
        self._enter(block)
        return block.forward(*inputs)

    def written(self) -> None:
        """Begin to renew the weights: see GatheredWeights."""
        self._whole.renew()
        super().written()

    def reload(self) -> None:
        """Renew all that depends on the masters: see GatheredWeights."""
        self.written()

    def gather(self) -> None:
        """Make all weights ready: see GatheredWeights."""
        for module in (*self._apart, *self._stale):
            self._enter(module)

    def interrupt(self) -> None:
        """Forget what a recording of a micro-step did that was not ended. Weights were ready when it began."""

    def _wait(self, number: int) -> None:
        self._whole.wait(number)


class PassingWeights(ResidentWeights):
    """Weights of ZeRO 3 that passes fetch without FSDP's hooks: those of a block are whole while a pass is in it, or in
    the block before. What is outside of the blocks stays whole, and is renewed right after each update."""

    def __init__(
        self,
        model: Transformer,
        units: Sequence[Unit],
        gathered: Sequence[Mapping[str, Tensor]],
        masters: Mapping[str, Tensor],
    ) -> None:
        self._blocks = PassingBlocks(gathered[1:], masters, units[0].ranks.shards)
        self._numbers: dict[nn.Module, int] = {unit.module: number for number, unit in enumerate(units[1:])}
        super().__init__(model, units, gathered, None, masters, stay=1)
        for block in self._numbers:
            block.register_forward_hook(lambda block, inputs, made: self._leave(block, made))

    def written(self) -> None:
        """Begin to renew the weights: see GatheredWeights."""
        super().written()
        self._blocks.renew()

    def gather(self) -> None:
        """Make the weights ready that a micro-step begins with: see GatheredWeights."""
        self._enter(self._model)
        self._blocks.begin_micro_step()

    def interrupt(self) -> None:
        """Forget what a recording did that was not ended: see ResidentWeights."""
        self._blocks.interrupt()

    def _call(self, block: nn.Module, *inputs: Any) -> Any:
        """Call a block without its hooks."""
        self._enter(block)
        made = block.forward(*inputs)
        self._leave(block, made)
        return made

    def _enter(self, module: nn.Module) -> None:
        number = self._numbers.get(module)
        if number is None:
            super()._enter(module)
        else:
            # A backward pass enters blocks that it recomputes.
            self._blocks.begin(number, number - 1 if _in_backward() else number + 1)

    def _leave(self, block: nn.Module, made: Any) -> None:
        """Let the backward pass fetch the weights of a block before it computes the first gradient in it."""
        number = self._numbers[block]

        def begin(gradient: Tensor) -> None:
            self._blocks.begin(number, number - 1)

        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(begin)


def _in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
