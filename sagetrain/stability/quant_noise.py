"""The error that attention and linear layers in 8 bits add to the gradients of weights, compared with the gradient
noise.

A probe runs N micro-batches of a step forward and backward twice, apart from the step. With 16-bit attention and linear
layers this gives the gradient g_i, and as the run has them it gives g_i + e_i. The errors are as independent as the
micro-batches. What they have in common is bias, b = E e. The product of two different errors estimates the square of
the bias, while the rest of them averages out:

    error^2 = mean of |e_i|^2                                           E |e|^2
    bias^2  = mean of <e_i, e_j> over i != j                            |b|^2, neither with a bias of its own
            = (|sum of e_i|^2 - sum of |e_i|^2) / (N (N - 1))

Every data-parallel rank takes its first micro-batch, and a single rank its first two. For a step of n micro-batches,

    error of the step^2 = bias^2 + (error^2 - bias^2) / n               exactly: E |mean of e_i|^2
    noise left = tr(S) / tokens per step                                (tr(S): noise_scale.py)
    ratio = error of the step^2 / noise left          bias_ratio = bias^2 / noise left

A ratio of 0.1 is as much as a tenth fewer tokens per step would add to the gradient's noise. The part of it that is
bias, bias_ratio, is not noise, and adds up over steps. More tokens per step leave less noise to hide a bias in
(config/earlier_run.py). The bias beside the gradient itself, at any tokens per step,

    bias_to_gradient = bias^2 / |G|^2

is what stays of the error however much is averaged. What INT8 attention cost our runs in loss went with it, and not
with the ratio (results/bias).

Under a loss mask micro-batch i has c_i tokens that count, and g_i and e_i are means over these. Errors of tokens add up
as their gradients do (noise_scale.py): E |e_i|^2 = |b|^2 + V / c_i. Micro-batches that count nothing have no error, and
are not among the N. With h, the harmonic mean of the N counts, and C, the tokens that count in the whole step,

    mean of |e_i|^2 = |b|^2 + V / h    in expectation, and <e_i, e_j> is as before, so that
    error of the step^2 = bias^2 + (error^2 - bias^2) h / C             exactly: E |sum of c_i / C e_i|^2
    noise left = tr(S) / C                                              (tr(S): of a token that counts)

Without a mask these are the formulas above, with h the tokens of a micro-batch and C those of the step.

How to read the numbers:
- One product of two errors is off by about 0.007 of error^2 in a block of 1e5 weights, and by less in larger ones. For
  the ratios, bias^2 is therefore this probe's error^2 times the share of bias in the error, averaged over probes as the
  noise scale is. A share below 0 counts as 0 in the ratio (bias_ratio shows it). With hundreds of micro-batches per
  step, the rest of that spread can be the larger part of the ratio. Under a mask the share grows with h, as |b|^2 / (V
  / h) does. The average is the share in a micro-batch that counts as a whole, and each probe enters it with h as its
  weight.
- The errors include the rounding of 16-bit arithmetic itself, also that of the reference.
- A layer's numbers are about the gradients of its weights, with all layers as they are, and not about its own rounding
  alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.config.earlier_run import ALL
from sagetrain.model.backends import AttentionFunction
from sagetrain.model.tensors import EMBEDDING
from sagetrain.model.transformer import Gradients, Transformer
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.noise_scale import Averages, LayerSquares, NoiseScale
from sagetrain.stability.spikes import METRIC as SPIKE


class QuantizationProbe:
    """Run micro-batches twice, and add quant_noise/<layer>/error_square and bias_square to groups.metrics.

    The passes are not compiled and leave no gradient behind. Each costs as much as two or three micro-batches, and
    memory for the gradients of three. Experts that ranks have between them are left out, as noise_scale.GradientNoise
    leaves them out.

    Args:
        reference: 16-bit attention, for the layers whose own attention quantizes something.
        leaves: the tensors that autograd gives gradients to, by name (Engine.leaves). None: the model's parameters.
    """

    def __init__(
        self, model: Transformer, reference: AttentionFunction, leaves: Mapping[str, Tensor] | None = None
    ) -> None:
        leaves = leaves or dict(model.named_parameters())
        groups, self._device = model.groups, next(iter(leaves.values())).device
        self._model, self._reference, self._groups = model, reference, groups
        left_out = "experts" if groups.ep_size > 1 else ""
        names = [name for name, spec in model.specs.items() if name in leaves and spec.cut != left_out]
        self._leaves = [leaves[name] for name in names]
        self._parts = [
            (groups.cp_group, groups.tp_group if model.specs[name].of_own_tokens else None) for name in names
        ]
        """The groups whose ranks have parts of a micro-batch's gradient of each tensor."""
        self._squares = LayerSquares(model.every_spec.values(), groups, self._device)
        self._places = torch.tensor([self._squares.place[name] for name in names], device=self._device)
        # A tied embedding has a gradient on the first and on the last stage of a pipeline. The first one counts the
        # sum.
        self._tied = names.index(EMBEDDING) if model.config.tie_embeddings and groups.ends_group else None

    @property
    def micro_batches(self) -> int:
        """The number of a step's micro-batches on this rank that `measure` needs: at least two on all ranks
        together."""
        return 2 if self._groups.dp_size == 1 else 1

    def measure(self, runs: Sequence[Gradients], counted: Sequence[int] | None = None) -> None:
        """Measure before a step begins. If only one micro-batch is given, there is an error but no bias. Nothing is
        done if no layer quantizes anything.

        Args:
            runs: different micro-batches as functions that return gradients, as many on every rank. Their losses are
                means over the counted tokens.
            counted: tokens of each that count in the loss; None: no loss mask.
        """
        groups = self._groups
        if not groups.on_any_stage(self._model.quantized):
            return
        sums: list[Tensor] = []
        squares = torch.zeros(len(self._leaves), dtype=torch.float64, device=self._device)
        for run in runs:
            rounded = self._gradients(run)
            with self._model.exact(self._reference):
                pairs = zip(rounded, self._gradients(run), strict=True)
            for i, (quantized, plain) in enumerate(pairs):
                error = (quantized.float() - plain.float()).flatten()
                # Of context-parallel ranks, this is the part of the micro-batch's gradient times cp_size.
                for group in self._parts[i]:
                    if group is not None:
                        dist.all_reduce(error, group=group)
                if i == self._tied:
                    dist.all_reduce(error, group=groups.ends_group)
                    error *= groups.pp_rank == 0
                squares[i] += error.dot(error)
                if len(sums) > i:
                    sums[i] += error
                else:
                    sums.append(error)
        count, cp_size = groups.dp_size * len(runs), groups.cp_size
        if counted is not None:
            count, tokens = self._known(counted)
            if not count:
                return
            groups.metrics.mean("quant_noise/counted", tokens)
        self._add("quant_noise/*/error_square", squares, 1 / (cp_size**2 * count))
        if count > 1:
            if groups.dp_size > 1:
                for total in sums:  # Under context parallelism this is also over ranks with the same sum.
                    dist.all_reduce(total, group=groups.replica_group)
            of_sum = torch.stack([total.dot(total) for total in sums]).double()
            share = 1 if groups.dp_size == 1 else groups.dp_size * cp_size**2
            factor = 1 / (cp_size**2 * count * (count - 1))
            self._add("quant_noise/*/bias_square", of_sum / share - squares, factor)

    def _add(self, what: str, squares: Tensor, factor: float) -> None:
        """Add sums of squares of this rank's parameters to the metrics. Those of other stages are 0 here."""
        every = squares.new_zeros(len(self._squares.place)).index_copy(0, self._places, squares)
        self._squares.add(what, every, factor, self._groups.cp_size)

    def _known(self, counted: Sequence[int]) -> tuple[int, float]:
        """Return how many of all ranks' micro-batches have tokens that count, and the harmonic mean of their
        numbers."""
        own = [1 / count for count in counted if count]
        sums = torch.tensor([len(own), sum(own)], dtype=torch.float64, device=self._device)
        if self._groups.dp_size > 1:
            dist.all_reduce(sums, group=self._groups.replica_group)
        # So many ranks give the same number for one micro-batch.
        ranks = self._groups.cp_size if self._groups.dp_size > 1 else 1
        count, inverse = (sums / ranks).tolist()
        return round(count), count / inverse if count else 0.0

    def _gradients(self, run: Gradients) -> Sequence[Tensor]:
        # Gradients that are asked for go to nobody else: neither into .grad nor to the engine's hooks.
        eager = torch.compiler.set_stance("force_eager")
        with eager, self._groups.metrics.aside():
            return run(self._leaves)


class QuantNoise(Averages):
    """A controller that decides nothing. It adds quant_noise/<layer>/ratio, bias_ratio and bias_to_gradient to what a
    probe has measured, and remembers how much of the error is bias. The controller `noise`, which comes before it,
    knows the noise of the gradients."""

    name = "quant_noise"

    def __init__(self, micro_batch_tokens: int, noise: NoiseScale, decay: float) -> None:
        super().__init__(micro_batch_tokens, decay)
        self._noise = noise

    def after_step(self, taken: Taken) -> list[Event]:
        """Compute the ratios, if this step had a probe of several micro-batches, the noise is known, and it is not a
        spike."""
        # This is the number of a micro-batch's tokens that count.
        tokens = taken.metrics.pop("quant_noise/counted", self._micro_batch_tokens)
        if taken.metrics.get(SPIKE) or taken.empty:
            return []
        suffix = "/bias_square"
        layers = [key.split("/")[1] for key in taken.metrics if key.startswith("quant_noise/") and key.endswith(suffix)]
        pairs = {
            layer: [taken.metrics[f"quant_noise/{layer}/{what}_square"] for what in ("error", "bias")]
            for layer in layers
        }
        if pairs:
            pairs[ALL] = [sum(pair[i] for pair in pairs.values()) for i in (0, 1)]
        whole = tokens / self._micro_batch_tokens
        for layer, (error, bias) in pairs.items():
            if not math.isfinite(error + bias):  # An infinite or undefined value would stay in the averages.
                continue
            taken.metrics[f"quant_noise/{layer}/error_square"] = error
            taken.metrics[f"quant_noise/{layer}/bias_square"] = bias
            if error > 0:  # The share is averaged, because the error changes when layers change their precision.
                self._average(layer, (bias / error,), whole)
            weight, share = self._averages.get(layer, (1.0, 0.0))
            bias = error * share / weight
            if whole < 1:  # The share was that of a whole micro-batch.
                bias = min(error, bias * whole)
            variance = self._noise.variance(layer)
            if variance is not None and variance > 0:
                left = variance / taken.counted
                common = max(0.0, bias)
                of_step = common + (error - common) * tokens / taken.counted
                taken.metrics[f"quant_noise/{layer}/ratio"] = of_step / left
                taken.metrics[f"quant_noise/{layer}/bias_ratio"] = bias / left
            if (square := self._noise.gradient_square(layer)) is not None:
                taken.metrics[f"quant_noise/{layer}/bias_to_gradient"] = bias / square
        return []
