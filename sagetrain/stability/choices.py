"""The experts that tokens choose, and how many choices 8 bits change.

A router takes the experts with the largest scores. A small error of its input therefore changes the choice of tokens
whose scores lie close together. Where experts are nearly equal such a flip costs little, so the number is to be read
beside the loss.

    moe/<layer>/flips     share of the tokens that have another set of experts with 16-bit attention and linear layers

It is measured at the steps of stability.monitor, before the step begins. Its first micro-batch goes forward and
backward twice, as the run has it and in 16 bits, not compiled and with every block recomputed. A layer's number is that
of all rounding in the layers up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from sagetrain.model.backends import AttentionFunction
from sagetrain.model.moe import MoE
from sagetrain.model.transformer import Gradients, Transformer, changed
from sagetrain.parallel.metrics import share


@contextmanager
def watching(model: Transformer, tell: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `tell` with the number of each layer and the experts that its tokens choose, int64 [T, per token], whenever
    a router chooses inside of this context. The model is not compiled meanwhile."""
    pairs = zip(model.numbers, model.blocks, strict=True)
    routers = {number: block.mlp.router for number, block in pairs if isinstance(block.mlp, MoE)}
    changes = {(router, "watch"): partial(tell, number) for number, router in routers.items()}
    with torch.compiler.set_stance("force_eager"), changed(changes):
        yield


class Flips:
    """Count the choices that 8 bits change, and add them to the metrics of the model's groups. This is a probe
    (engines/protocol.py).

    Args:
        reference: 16-bit attention, for the layers whose own attention quantizes something.
        leaves: the tensors that autograd gives gradients to, by name (Engine.leaves).
    """

    micro_batches = 1

    def __init__(self, model: Transformer, reference: AttentionFunction, leaves: Mapping[str, Tensor]) -> None:
        self._model, self._reference = model, reference
        # Its gradient takes the backward pass through all layers, as the hooks of engines want it.
        self._first = next(iter(leaves.values()))

    def measure(self, runs: Sequence[Gradients], counted: Sequence[int] | None = None) -> None:
        """Measure the first micro-batch. Collective. It leaves no gradient behind, and does nothing if no layer
        quantizes anything."""
        groups = self._model.groups
        if not groups.on_any_stage(self._model.quantized):
            return
        own = self._choices(runs[0], nullcontext())
        for layer, wide in self._choices(runs[0], self._model.exact(self._reference)).items():
            differs = (own[layer].sort(-1).values != wide.sort(-1).values).any(-1)
            groups.metrics.derive(f"moe/{layer}/flips", share, differs.sum(), len(differs))

    def _choices(self, run: Gradients, precision: AbstractContextManager[None]) -> dict[int, Tensor]:
        """Return the choices of all passes through each layer. Where blocks are recomputed each is there twice."""
        found: dict[int, list[Tensor]] = {}
        recomputed = changed({(self._model, "activation_checkpointing"): "full"})
        with (
            precision,
            recomputed,
            self._model.groups.metrics.aside(),
            torch.enable_grad(),
            watching(self._model, lambda layer, choices: found.setdefault(layer, []).append(choices)),
        ):
            run([self._first])
        return {layer: torch.cat(choices) for layer, choices in found.items()}
