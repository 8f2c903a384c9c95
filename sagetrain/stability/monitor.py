"""The error of INT8 attention, measured while training every n steps against float32, from the same Q, K, V and dO.

The first micro-batch of such a step is measured on each chosen layer. x is a tensor of the INT8 path and y the exact
one, for x among O, delta, P, dP, dS, dQ, dK and dV (sagekernels/observe.py says what is taken from the kernels, and
from which sample):

    quant/<layer>/<x>/rel_l2     sqrt(sum (x - y)^2 / sum y^2)
    quant/<layer>/<x>/cosine     sum x y / sqrt(sum x^2 sum y^2)
    quant/<layer>/S/largest      largest attention logit, q k^T / sqrt(d), exact
    quant/<layer>/dS/zero_share_dQ, zero_share_dK
                                 of the entries of dS that are not zero, the share that INT8 rounds to zero on the way
                                 to dQ and to dK (not with recipe scores, which keeps them in 16 bits)
    quant/<layer>/<Q, K, dO, dS>/scale_min, scale_max
                                 range of the scales of their INT8 codes, those of dO and dS for the step's mean loss
    quant/<layer>/<Q, K>/gain_mean, gain_max
                                 learned gains of QK-norm, from the fp32 weights

Layers count from 0. Sums run over the samples of all ranks and are reduced in the step's one collective before the root
is taken. A number is therefore that of one large sample, not a mean of the ranks' numbers. It is the same at every
layout as long as each rank's sample is all that the rank has.

Memory: about 250 MiB while a layer is measured, and copies of the sample's q and k of every chosen layer from its
forward to its backward pass. These are 8 MiB per layer at 4,096 tokens with heads of 128, and 32 MiB at 131,072.

The operators of the kernels report their calls as they run. torch.compile therefore builds no other graph, the observed
micro-batch computes what it would compute anyway, and no loss of the run changes. The order of the calls tells which
layer a call belongs to: blocks go forward, and once more from the last to the first if activations are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sagekernels.call import BackwardCall, Call, Gradients, Saved
from sagekernels.observe import Kept, Sample, keep, measure, observed, pooled_cosine, pooled_rel_l2
from sagetrain.config.arithmetic import attention_calls
from sagetrain.config.schema import MonitorConfig
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.metrics import Metrics, share

EVERY_STEPS = 100
"""The number of steps that `auto` stands for where something is quantized."""
SAMPLE_SCORES = 1 << 26
"""Scores of one sample: four heads of a sequence of 4,096 tokens, or the last 512 queries of a head over 131,072."""

OwnedGains = Callable[[], Iterable[tuple[str, Tensor]]]
"""A function that returns the names of the model's parameters, each with the part that this rank owns, which may be
empty. All ranks return all names."""


class Monitor:
    """Measure the error of attention in a Transformer, and add it to the metrics of its groups.

    Layers that quantize nothing at the time are skipped, so they may change while training.
    """

    def __init__(
        self, config: MonitorConfig, model: Transformer, gains: OwnedGains, scores: int = SAMPLE_SCORES
    ) -> None:
        self.every = EVERY_STEPS if config.every_steps == "auto" else config.every_steps
        count = model.config.num_layers
        self.chosen = set(range(count)) if config.layers == "all" else {layer % count for layer in config.layers}
        self._model, self._gains, self._scores = model, gains, scores

    @property
    def layers(self) -> list[int]:
        """The chosen layers of this pipeline stage that quantize something now."""
        return [layer for layer in self._quantized() if layer in self.chosen]

    def watch(self, step: int) -> Callable[[int, int], WatchedAttention] | None:
        """Return what watches a micro-batch of step number `step`, of so many sequences of so many tokens. Return None
        if nothing is measured at that step. In a pipeline all stages take part, whatever their own layers do."""
        if self.every is None or step % self.every or not (self.layers or self._model.groups.pp_size > 1):
            return None
        return partial(self._watched, step // self.every)

    def _quantized(self) -> list[int]:
        pairs = zip(self._model.numbers, self._model.functions, strict=True)
        return [layer for layer, function in pairs if function.quantized]

    @contextmanager
    def micro_batch(self, turn: int, num_sequences: int, length: int) -> Iterator[None]:
        """Measure the forward and backward pass through the whole model inside of this context. Raises RuntimeError if
        the calls of attention were not those of one forward and one backward pass.

        Args:
            turn: number of the measurement; another one takes another sample.
            num_sequences: sequences on this rank (with its context-parallel group).
        """
        watched, blocks = self._watched(turn, num_sequences, length), range(self._model.config.num_layers)
        watched.expect(blocks, backward=False)
        with watched.passing(blocks, backward=True):
            yield
        watched.end()

    def _watched(self, turn: int, num_sequences: int, length: int) -> WatchedAttention:
        model, groups = self._model, self._model.groups
        own_tokens = num_sequences * length // groups.cp_size
        parts = attention_calls(num_sequences, own_tokens, groups.tp_size, model.overlap)
        return WatchedAttention(
            self._quantized(),
            set(self.layers),
            model.recomputed_blocks,
            parts,
            num_sequences // parts,
            self._scores,
            turn,
            groups.metrics,
            groups.num_replicas,
            conclude=partial(self._add_gains, groups.metrics),
        )

    def _add_gains(self, metrics: Metrics) -> None:
        tags = {
            f"blocks.{layer}.attention.{norm}.gain": f"quant/{layer}/{tensor}"
            for layer in self.layers
            for norm, tensor in (("q_norm", "Q"), ("k_norm", "K"))
        }
        for name, gain in self._gains():
            if tag := tags.get(name):
                metrics.derive(f"{tag}/gain_mean", share, gain.sum(), gain.numel())
                metrics.max(f"{tag}/gain_max", torch.cat([gain.flatten(), gain.new_full((1,), -math.inf)]).max())


@dataclass
class WatchedAttention:
    """The observer of the attention calls in one micro-batch (engines/protocol.Watched)."""

    quantized: list[int]
    """The layers that quantize something, which report their calls."""
    layers: set[int]
    """The layers that are measured."""
    recomputed: int
    """The number of blocks, from the first on, whose forward pass runs once more in the backward pass."""
    parts: int
    """Number of calls of a layer in one pass."""
    sequences: int
    """Number of sequences in one call."""
    scores: int
    turn: int
    metrics: Metrics
    replicas: int
    """Number of replicas that gradients are averaged over later."""
    conclude: Callable[[], None]
    """Adds what is measured beside the calls."""
    order: list[int | None] = field(default_factory=list)
    """Layers of the forward passes so far and of those that are expected. None stands for a pass of which nothing is
    kept."""
    forwards: int = 0
    kept: dict[int, tuple[int, Kept]] = field(default_factory=dict)
    """Layer and sample of a forward pass, by the address of what it saved for its backward pass."""
    measured: int = 0

    def expect(self, blocks: range, backward: bool) -> None:
        """Expect the calls of a pass through these blocks."""
        order = [layer for layer in self.quantized if layer in blocks for _ in range(self.parts)]
        # The first forward pass keeps only residual streams of the blocks that are recomputed.
        if backward:
            self.order += [layer for layer in reversed(order) if layer < self.recomputed]
        else:
            self.order += [None if layer < self.recomputed else layer for layer in order]

    @contextmanager
    def passing(self, blocks: range, backward: bool) -> Iterator[None]:
        """Measure a pass through these blocks inside of this context."""
        self.expect(blocks, backward)
        with observed(self):
            yield

    def forward(self, call: Call, saved: Saved) -> None:
        layer = self.order[self.forwards] if self.forwards < len(self.order) else None
        self.forwards += 1
        if layer in self.layers:
            sample = Sample.of(call.q, call.k, self.sequences // call.q.shape[0], self.scores, self.turn)
            self.kept[saved.lse.data_ptr()] = layer, keep(call, sample)

    def backward(self, call: BackwardCall, grads: Gradients) -> None:
        if (found := self.kept.pop(call.saved.lse.data_ptr(), None)) is None:
            return
        layer, kept = found
        self.measured += 1
        tag, metrics = f"quant/{layer}", self.metrics
        sums = measure(call, grads, kept)
        for name, squares in sums.squares.items():
            metrics.derive(f"{tag}/{name}/cosine", pooled_cosine, *squares.unbind())
            metrics.derive(f"{tag}/{name}/rel_l2", pooled_rel_l2, *squares.unbind())
        for name, counts in sums.zeros.items():
            metrics.derive(f"{tag}/dS/zero_share_{name}", share, *counts.unbind())
        for name, (least, largest) in sums.scales.items():
            part = 1 / self.replicas if name.startswith("d") else 1
            metrics.min(f"{tag}/{name}/scale_min", least * part)
            metrics.max(f"{tag}/{name}/scale_max", largest * part)
        metrics.max(f"{tag}/S/largest", sums.largest_logit)

    def end(self) -> None:
        """Check that every call came, and that every layer was measured. Raises RuntimeError if the calls of attention
        were not those of one forward and one backward pass."""
        expected = sum(layer in self.layers for layer in self.order)
        if (self.forwards, self.measured) != (len(self.order), expected):
            raise RuntimeError(
                f"stability.monitor: {self.forwards} forward passes of INT8 attention and {self.measured} measured "
                f"backward passes in a micro-batch, not {len(self.order)} and {expected}; "
                "stability.monitor.every_steps null turns the monitor off"
            )
        self.conclude()
