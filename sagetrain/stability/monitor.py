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
from functools import partial

import torch
from torch import Tensor

from sagekernels.call import BackwardCall, Call, Gradients, Saved
from sagekernels.observe import Kept, Sample, keep, measure, observed, pooled_cosine, pooled_rel_l2
from sagetrain.config.arithmetic import attention_calls
from sagetrain.config.schema import MonitorConfig
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.metrics import share

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
        self.model, self.scores, self._gains = model, scores, gains

    @property
    def quantized(self) -> list[int]:
        """The layers of this pipeline stage that quantize something now, and report their calls."""
        pairs = zip(self.model.numbers, self.model.functions, strict=True)
        return [layer for layer, function in pairs if function.quantized]

    @property
    def layers(self) -> list[int]:
        """The chosen layers of this pipeline stage that quantize something now, which are measured."""
        return [layer for layer in self.quantized if layer in self.chosen]

    def watch(self, step: int) -> Callable[[int, int], WatchedAttention] | None:
        """Return what watches a micro-batch of step number `step`, of so many sequences of so many tokens. Return None
        if nothing is measured at that step. In a pipeline all stages take part, whatever their own layers do."""
        if self.every is None or step % self.every or not (self.layers or self.model.groups.pp_size > 1):
            return None
        return partial(WatchedAttention, self, step // self.every)

    @contextmanager
    def micro_batch(self, turn: int, num_sequences: int, length: int) -> Iterator[None]:
        """Measure the forward and backward pass through the whole model inside of this context. Raises RuntimeError if
        the calls of attention were not those of one forward and one backward pass.

        Args:
            turn: number of the measurement; another one takes another sample.
            num_sequences: sequences on this rank (with its context-parallel group).
        """
        watched, blocks = WatchedAttention(self, turn, num_sequences, length), range(self.model.config.num_layers)
        watched.expect(blocks, backward=False)
        with watched.passing(blocks, backward=True):
            yield
        watched.end()

    def add_gains(self) -> None:
        """Add the gains of QK-norm of the measured layers."""
        metrics = self.model.groups.metrics
        tags = {
            f"blocks.{layer}.attention.{norm}.gain": f"quant/{layer}/{tensor}"
            for layer in self.layers
            for norm, tensor in (("q_norm", "Q"), ("k_norm", "K"))
        }
        for name, gain in self._gains():
            if tag := tags.get(name):
                metrics.derive(f"{tag}/gain_mean", share, gain.sum(), gain.numel())
                metrics.max(f"{tag}/gain_max", torch.cat([gain.flatten(), gain.new_full((1,), -math.inf)]).max())


class WatchedAttention:
    """The observer of the attention calls in one micro-batch (engines/protocol.Watched)."""

    def __init__(self, monitor: Monitor, turn: int, num_sequences: int, length: int) -> None:
        model, groups = monitor.model, monitor.model.groups
        self._monitor, self._turn, self._groups = monitor, turn, groups
        self._quantized, self._layers, self._recomputed = monitor.quantized, monitor.layers, model.recomputed_blocks
        own_tokens = num_sequences * length // groups.cp_size
        self._parts = attention_calls(num_sequences, own_tokens, groups.tp_size, model.overlap)
        """The number of calls of a layer in one pass."""
        self._sequences = num_sequences // self._parts
        """The number of sequences in one call."""
        self._order: list[int | None] = []
        """Layers of the forward passes so far and of those that are expected. None stands for a pass of which nothing
        is kept."""
        self._kept: dict[int, tuple[int, Kept]] = {}
        """Layer and sample of a forward pass, by the address of what it saved for its backward pass."""
        self._forwards = self._measured = 0

    def expect(self, blocks: range, backward: bool) -> None:
        """Expect the calls of a pass through these blocks."""
        order = [layer for layer in self._quantized if layer in blocks for _ in range(self._parts)]
        # The first forward pass keeps only residual streams of the blocks that are recomputed.
        if backward:
            self._order += [layer for layer in reversed(order) if layer < self._recomputed]
        else:
            self._order += [None if layer < self._recomputed else layer for layer in order]

    @contextmanager
    def passing(self, blocks: range, backward: bool) -> Iterator[None]:
        """Measure a pass through these blocks inside of this context."""
        self.expect(blocks, backward)
        with observed(self):
            yield

    def forward(self, call: Call, saved: Saved) -> None:
        layer = self._order[self._forwards] if self._forwards < len(self._order) else None
        self._forwards += 1
        if layer in self._layers:
            each = self._sequences // call.q.shape[0]
            sample = Sample.of(call.q, call.k, each, self._monitor.scores, self._turn)
            self._kept[saved.lse.data_ptr()] = layer, keep(call, sample)

    def backward(self, call: BackwardCall, grads: Gradients) -> None:
        if (found := self._kept.pop(call.saved.lse.data_ptr(), None)) is None:
            return
        layer, kept = found
        self._measured += 1
        tag, metrics = f"quant/{layer}", self._groups.metrics
        sums = measure(call, grads, kept)
        for name, squares in sums.squares.items():
            metrics.derive(f"{tag}/{name}/cosine", pooled_cosine, *squares.unbind())
            metrics.derive(f"{tag}/{name}/rel_l2", pooled_rel_l2, *squares.unbind())
        for name, counts in sums.zeros.items():
            metrics.derive(f"{tag}/dS/zero_share_{name}", share, *counts.unbind())
        for name, (least, largest) in sums.scales.items():
            # The step averages gradients over the replicas.
            part = 1 / self._groups.num_replicas if name.startswith("d") else 1
            metrics.min(f"{tag}/{name}/scale_min", least * part)
            metrics.max(f"{tag}/{name}/scale_max", largest * part)
        metrics.max(f"{tag}/S/largest", sums.largest_logit)

    def end(self) -> None:
        """Check that every call came, and that every layer was measured. Raises RuntimeError if the calls of attention
        were not those of one forward and one backward pass."""
        expected = sum(layer in self._layers for layer in self._order)
        if (self._forwards, self._measured) != (len(self._order), expected):
            raise RuntimeError(
                f"stability.monitor: {self._forwards} forward passes of INT8 attention and {self._measured} measured "
                f"backward passes in a micro-batch, not {len(self._order)} and {expected}; "
                "stability.monitor.every_steps null turns the monitor off"
            )
        self._monitor.add_gains()
