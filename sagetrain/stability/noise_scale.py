"""The gradient noise scale, estimated from the gradients that a step computes anyway.

A step is n micro-batches of b tokens, on all data-parallel ranks together. The gradient of one micro-batch, g_i, is the
gradient of the whole distribution, G, plus noise of covariance S / b. S is the covariance of a single token's gradient.
The gradient of the step is the mean of the g_i. (Tokens of a micro-batch are not independent: S is what a token adds at
this micro-batch and sequence length.) Therefore

    E |g_i|^2 = |G|^2 + tr(S) / b            small: the mean of |g_i|^2 over the micro-batches
    E |mean|^2 = |G|^2 + tr(S) / (n b)       mean:  the squared norm of the step's gradient, before clipping

    tr(S)  = b n / (n - 1) (small - mean)
    |G|^2  = (n mean - small) / (n - 1)

and neither estimate has a bias. Their quotient tr(S) / |G|^2 is the gradient noise scale B_simple, in tokens (An
Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1). Steps of fewer tokens are mostly noise, and
steps of more have less and less of it. A quotient of estimates is biased by their noise, so each of the two is averaged
over steps first. The averages are exponential, and the effect of the zeros at the beginning is divided out.

Under a loss mask micro-batch i has c_i tokens that count, C in all, and the step's gradient is the sum of w_i g_i. Here
g_i is the mean over those c_i tokens, and w_i = c_i / C. S is then the covariance of a counted token's gradient, and
the covariance of g_i is S / c_i. A micro-batch's part of the step's gradient, times n, is n w_i g_i. With q = n (sum of
w_i^2), which is 1 if all micro-batches count the same and n if only one counts at all,

    E small = (1/n) (sum of n^2 w_i^2 (|G|^2 + tr(S) / c_i)) = q |G|^2 + n tr(S) / C
    E mean = |G|^2 + (sum of w_i^2 tr(S) / c_i) = |G|^2 + tr(S) / C

    tr(S)  = C / (n - q) (small - q mean)
    |G|^2  = (n mean - small) / (n - q)

again without a bias, whatever the counts are. A micro-batch that counts nothing adds nothing. The nearer q is to n, the
less such a step says, so it enters the averages with a weight of (n - q) / (n - 1). The noise scale is given in tokens
of the step as tokens_per_step has them, including those that do not count: tr(S) / |G|^2 times their number / C.

Layers are "0", "1", ... for the blocks, "embedding" (if tied, with its gradient as output projection), "head" (output
projection and final norm) and "all". Every parameter counts once, whatever the layout. Shards are added over
tensor-parallel ranks, and copies are divided by their number. Under context parallelism the gradient of a micro-batch
is spread over ranks, so these ranks add gradients instead of norms. In a pipeline, a tied embedding has a gradient on
the last stage and one on the first. The last stage sends its own to the first one, which adds both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.config.earlier_run import ALL
from sagetrain.model.placement import place
from sagetrain.model.tensors import EMBEDDING, TensorSpec
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Controller, Event, Taken
from sagetrain.stability.spikes import METRIC as SPIKE


class Averages(Controller):
    """A controller that remembers exponential averages of what steps have measured, by layer.

    Args:
        micro_batch_tokens: tokens of one rank's micro-batch.
        decay: weight that the averages keep at a new measurement.
    """

    of_sequences = True

    def __init__(self, micro_batch_tokens: int, decay: float) -> None:
        self._micro_batch_tokens, self._decay = micro_batch_tokens, decay
        self._averages: dict[str, list[float]] = {}
        """[weight, average x weight, ...] of each layer."""

    def _average(self, layer: str, new: Sequence[float], weight: float) -> None:
        """Update the averages of a layer by numbers that are multiplied by the weight that they enter with."""
        pairs = zip(self._averages.get(layer, [0.0] * (1 + len(new))), (weight, *new), strict=True)
        self._averages[layer] = [self._decay * old + (1 - self._decay) * number for old, number in pairs]

    def state(self) -> dict[str, Any]:
        return {"averages": self._averages}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._averages = {layer: list(average) for layer, average in state.get("averages", {}).items()}


class LayerSquares:
    """Sums of squares by layer, over every rank's part of the parameters. Each element of the model counts once.

    Args:
        of_experts: the factor of squares of experts that ranks have between them, which have other copies than
            everything else.
    """

    def __init__(
        self, specs: Collection[TensorSpec], groups: ParallelGroups, device: torch.device, of_experts: float = 1.0
    ) -> None:
        self.layers = list(dict.fromkeys(str(spec.layer) for spec in specs))
        """All layers, in the order of the model."""
        self.place = {spec.name: number for number, spec in enumerate(specs)}
        """The place of each parameter in the vectors that `add` takes, by name."""
        copies = [place(spec, groups).copies for spec in specs]
        self._layer = torch.tensor([self.layers.index(str(spec.layer)) for spec in specs], device=device)
        self._share = 1 / torch.tensor(copies, dtype=torch.float64, device=device)
        for spec in specs if groups.ep_size > 1 else ():
            if spec.cut == "experts":
                self._share[self.place[spec.name]] *= of_experts
        self._groups = groups

    def add(self, what: str, squares: Tensor, factor: Tensor | float, copies: int) -> None:
        """Add `factor` times the squares by parameter to the metrics, summed over all ranks.

        Args:
            what: name of the metric, with * for the layer.
            squares: [parameters] sums of squares on this rank.
            copies: number of replicas that have the same squares.
        """
        by_layer = squares.new_zeros(len(self.layers)).index_add(0, self._layer, squares * self._share) * factor
        for layer, value in zip(self.layers, by_layer.unbind(), strict=True):
            self._groups.metrics.sum(what.replace("*", layer), value, copies)


class GradientNoise:
    """Measure the squared norms of single micro-batches' gradients and of the step's gradient.

    The results are noise/<layer>/small and noise/<layer>/mean in groups.metrics, from which NoiseScale makes estimates.
    Under a loss mask there are also noise/counted and noise/counted_square, the sums of c_i and of c_i^2. This costs a
    pass over the gradients of every micro-batch, and under context parallelism their all-reduce, as those of experts
    under tensor parallelism.

    Experts that ranks have between them are left out: a rank's gradient of them is that of the tokens of several
    micro-batches.

    Args:
        leaves: the tensors that autograd gives gradients to, by name (Engine.leaves). In a pipeline they are those of
            this rank's stage.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        specs: Collection[TensorSpec],
        groups: ParallelGroups,
        device: torch.device,
    ) -> None:
        specs = [spec for spec in specs if spec.cut != "experts" or groups.ep_size == 1]
        self._groups = groups
        self._parameters = {number: leaves[spec.name] for number, spec in enumerate(specs) if spec.name in leaves}
        self._own = {number for number, spec in enumerate(specs) if spec.of_own_tokens and groups.tp_size > 1}
        """The places of the parameters of which tensor-parallel ranks have parts of the gradient."""
        self._squares = LayerSquares(specs, groups, device)
        self._norms = torch.zeros(len(specs), dtype=torch.float32, device=device)
        self._small = torch.zeros(len(specs), dtype=torch.float64, device=device)
        self._mean = torch.zeros_like(self._small)
        self._counted: list[int] = []
        ends, place = groups.ends_messages if "head.weight" not in self._squares.place else None, self._squares.place
        self._tied = _TiedGradient(ends, groups.pp_rank > 0, place[EMBEDDING], device) if ends else None

    def count(self, counted: int) -> None:
        """Note the number of tokens of a micro-batch that count in the loss. Call it for every micro-batch under a loss
        mask."""
        self._counted.append(counted)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Measure the backward pass of a micro-batch inside of this context. Hooks see the gradient of all uses of a
        parameter together, before it is added to the gradients of other micro-batches."""
        self._norms.zero_()
        hooks: list[Any] = []
        for number, parameter in self._parameters.items():
            hooks.append(parameter.register_hook(partial(self._note, number)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._small += self._norms.double().square()

    def _note(self, place: int, gradient: Tensor) -> None:
        gradient = gradient.detach()
        if self._tied and place == self._tied.place:
            whole = self._tied.whole(gradient)
            if whole is None:
                return
            gradient = whole
        parts = [self._groups.cp_group, self._groups.tp_group if place in self._own else None]
        if any(group is not None for group in parts):
            # This is a copy, or DeepSpeed's own tensor.
            gradient = gradient.float()
            gradient = gradient.clone() if gradient.dtype == torch.float32 else gradient
        for group in parts:
            if group is not None:
                dist.all_reduce(gradient, group=group)
        torch.linalg.vector_norm(gradient, dtype=torch.float32, out=self._norms[place])

    def of_step(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Add parts of the step's mean gradient, each with the name of its parameter. No part may be on two
        replicas."""
        names, parts = zip(*(part for part in gradients if part[0] in self._squares.place), strict=True)
        places = torch.tensor([self._squares.place[name] for name in names], device=self._mean.device)
        norms = torch.stack(torch._foreach_norm(list(parts))).to(self._mean.device)
        self._mean.index_add_(0, places, norms.double().square())

    def finish(self, accumulation: int, clipping: Tensor | float, copies: int) -> None:
        """Add the results to the metrics after the step.

        Args:
            accumulation: number that the loss of each micro-batch was divided by.
            clipping: factor that the step's gradients had been multiplied by.
            copies: number of replicas that gave the same to `of_step`.
        """
        if self._tied:
            self._tied.finish()
        cp_size, micro_batches = self._groups.cp_size, accumulation * self._groups.dp_size
        factor = (accumulation / cp_size) ** 2 / micro_batches
        self._squares.add("noise/*/small", self._small, factor, cp_size)
        self._squares.add("noise/*/mean", self._mean, clipping**-2, copies)
        if self._counted:
            # These ranks have the same micro-batches.
            same = self._groups.tp_size * cp_size * self._groups.pp_size
            self._groups.metrics.sum("noise/counted", sum(self._counted), same)
            self._groups.metrics.sum("noise/counted_square", sum(count**2 for count in self._counted), same)
            self._counted.clear()
        self._small.zero_()
        self._mean.zero_()


class _TiedGradient:
    """The gradient of a tied embedding, of which the last stage of a pipeline has a part and the first one the rest;
    collective.

    Args:
        sends: this is the last stage.
        place: the place of the embedding among the parameters.
    """

    def __init__(self, ends: dist.ProcessGroup, sends: bool, place: int, device: torch.device) -> None:
        self._ends, self._sends, self.place = ends, sends, place
        self._sent: list[tuple[Any, Tensor]] = []
        # NCCL connects two ranks in their first message, for which both wait. In a step the last stage would wait for a
        # backward pass of the first one, which waits for the last one's.
        number = torch.zeros(1, device=device)
        if sends:
            dist.send(number, group=ends, group_dst=0)
        else:
            dist.recv(number, group=ends, group_src=1)

    def whole(self, own: Tensor) -> Tensor | None:
        """Return the sum of both parts of a micro-batch's gradient. Return None on the last stage, whose backward pass
        comes first. Both stages take the micro-batches in the same order."""
        if self._sends:
            part = own.clone()
            self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
            self._sent.append((dist.isend(part, group=self._ends, group_dst=0), part))
            return None
        other = torch.empty_like(own)
        dist.recv(other, group=self._ends, group_src=1)
        return own.float() + other

    def finish(self) -> None:
        """Wait for the messages of the step."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


class NoiseScale(Averages):
    """A controller that decides nothing. It makes estimates of what GradientNoise has measured, and remembers them.

    It replaces those metrics by noise/<layer>/scale_tokens, noise/<layer>/variance, tr(S), and
    noise/<layer>/gradient_square, |G|^2, averaged over steps.
    """

    name = "noise_scale"

    def variance(self, layer: str) -> float | None:
        """Return tr(S), the variance of the gradient of one token that counts. Return None before the first
        measurement."""
        if layer not in self._averages:
            return None
        weight, variance, _ = self._averages[layer]
        return variance / weight

    def gradient_square(self, layer: str) -> float | None:
        """Return |G|^2. Return None before the first measurement, and while only noise was seen."""
        weight, _, square = self._averages.get(layer, (1.0, 0.0, 0.0))
        return square / weight if square > 0 else None

    def after_step(self, taken: Taken) -> list[Event]:
        """Make estimates if this step was measured and is not a spike."""
        measured = [key.split("/")[1] for key in taken.metrics if re.fullmatch(r"noise/\w+/small", key)]
        pairs = {layer: [taken.metrics.pop(f"noise/{layer}/{of}") for of in ("small", "mean")] for layer in measured}
        n = taken.tokens_per_step // self._micro_batch_tokens
        tokens = n * self._micro_batch_tokens
        counted, squares = (taken.metrics.pop(f"noise/{of}", None) for of in ("counted", "counted_square"))
        # A spike says nothing about the noise of other steps, and would stay in the averages for long.
        if taken.metrics.get(SPIKE) or taken.empty or not pairs:
            return []
        q = 1.0
        if counted is None or squares is None:
            counted = tokens
        elif (q := n * squares / max(1.0, counted**2)) in (0, n):  # Only one micro-batch counts, or none.
            return []
        pairs[ALL] = [sum(pair[i] for pair in pairs.values()) for i in (0, 1)]
        for layer, (small, mean) in pairs.items():
            new = counted / (n - 1) * (small - q * mean), (n * mean - small) / (n - 1)
            self._average(layer, new, (n - q) / (n - 1))
            weight, variance, square = self._averages[layer]
            taken.metrics[f"noise/{layer}/variance"] = variance / weight
            taken.metrics[f"noise/{layer}/gradient_square"] = square / weight
            if square > 0:  # Otherwise only noise was seen so far.
                taken.metrics[f"noise/{layer}/scale_tokens"] = variance / square * (tokens / counted)
        return []
