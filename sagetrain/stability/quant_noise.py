"""What quantized attention adds to the gradients of weights, measured against the noise that they have anyway.

A probe runs one micro-batch forward and backward three times, apart from the step: with the 16-bit attention of torch,
which gives g, and twice quantized, which gives g + e and g + e'. The quantized passes differ in rotations of heads: an
orthogonal matrix is applied to q and to k, which leaves their products as they are, another one to v, and its inverse
to o. In exact arithmetic nothing changes; what is rounded, and how, does. So the part of the error that comes with
every rotation, the bias, is in both, and the rest is independent in them:

    error^2 = (|e|^2 + |e'|^2) / 2        bias^2 = <e, e'>, its expectation |E e|^2 without a bias of its own

These are of one micro-batch (the mean over the data-parallel ranks, each with its own). A step averages n of them. Then
the independent part of the error falls like 1 / n, as the noise of the gradient does, and the bias stays:

    error of the step^2 = bias^2 + (error^2 - bias^2) / n
    noise left = tr(S) / tokens per step                                             (tr(S): noise_scale.py)
    ratio = error of the step^2 / noise left          bias_ratio = bias^2 / noise left

A ratio of .1 is as much as a tenth less tokens per step would add to the gradient's noise; but the part of it that is
bias, bias_ratio, is no noise, and adds up over steps. At n' micro-batches instead of n the ratio would be

    ratio - bias_ratio + bias_ratio n' / n

as more tokens per step leave less noise to hide a bias in. What to know when reading them:
- The error of the step is a bound from above: a bias that is another one for every micro-batch averages out over them,
  too. What the rotations hardly reach, the rounding of P and dS, is partly of that kind.
- Rotations spread outliers of single channels over all of them: unrotated, the error may be larger.
- What 16-bit arithmetic itself rounds is in e and e', that of the reference in both.
- A layer's numbers are about the gradients of its weights, with all layers quantized, not about its own attention
  alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.model.backends import AttentionFunction, Documents, TokenLayout
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.rng import named_generator
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.noise_scale import ALL, LayerSquares, NoiseScale


@dataclass(frozen=True, eq=False)
class Rotated(AttentionFunction):
    """A function between rotations of heads that undo each other."""

    function: AttentionFunction
    scores: Tensor
    """fp32 [head_dim, head_dim], orthogonal: of q and k."""
    values: Tensor
    """The same, of v and o."""

    @property
    def documents(self) -> Documents:  # type: ignore[override]
        return self.function.documents

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        o = self.function(_turned(q, self.scores), _turned(k, self.scores), _turned(v, self.values), layout)
        return _turned(o, self.values.T)


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    return (x.float() @ rotation).to(x.dtype)


def random_rotation(size: int, seed: int, name: str) -> Tensor:
    """An orthogonal matrix, fp32 [size, size], uniform over all of them, that depends on (seed, name) alone."""
    normal = torch.randn(size, size, generator=named_generator(seed, name), dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    rotation: Tensor = (q * r.diagonal().sign()).float()
    return rotation


class QuantizationProbe:
    """Runs a micro-batch three times and adds quant_noise/<layer>/error_square and bias_square to groups.metrics.

    The passes are not compiled and leave no gradient behind; they cost as much as three or four micro-batches, and
    memory for the gradients of three. Layers that quantize nothing keep their function.

    Args:
        reference: 16-bit attention.
        seed: of the rotations.
    """

    def __init__(
        self, model: Transformer, reference: AttentionFunction, groups: ParallelGroups, device: torch.device, seed: int
    ) -> None:
        self._model, self._reference, self._groups, self._device, self._seed = model, reference, groups, device, seed
        self._squares = LayerSquares(model, groups, device)

    def measure(self, step: int, run: Callable[[], Tensor]) -> None:
        """At a step that has not begun: `run` is the forward pass of a micro-batch, the same each time, to its loss.
        Nothing, where no layer quantizes anything."""
        layers = self._model.functions
        if not any(layer.quantized for layer in layers):
            return
        gradients = [
            self._gradients([self._reference if layer.quantized else layer for layer in layers], run),
            *(self._gradients([self._rotated(*pair, step, i) for pair in enumerate(layers)], run) for i in (0, 1)),
        ]
        found = []
        for exact, *quantized in zip(*gradients, strict=True):
            errors = [(q.float() - exact.float()).flatten() for q in quantized]
            if self._groups.cp_group is not None:  # this rank's part of the micro-batch's gradient, times cp_size
                for error in errors:
                    dist.all_reduce(error, group=self._groups.cp_group)
            one, two = errors
            found.append(torch.stack([(one.dot(one) + two.dot(two)) / 2, one.dot(two)]))
        self._groups.metrics.clear()  # what the model has added meanwhile is of no step
        factor = 1 / (self._groups.cp_size**2 * self._groups.dp_size)
        for name, squares in zip(("error", "bias"), torch.stack(found).double().T, strict=True):
            self._squares.add(f"quant_noise/*/{name}_square", squares, factor, self._groups.cp_size)

    def _rotated(self, layer: int, function: AttentionFunction, step: int, pass_: int) -> AttentionFunction:
        if not function.quantized:
            return function
        size = self._model.config.head_dim
        names = (f"rotation of {what} {layer}, step {step}, pass {pass_}" for what in ("scores", "values"))
        return Rotated(function, *(random_rotation(size, self._seed, name).to(self._device) for name in names))

    def _gradients(self, functions: Sequence[AttentionFunction], run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        # Asked for, gradients go to nobody else: neither into .grad nor to DeepSpeed's hooks.
        with _attending(self._model, functions), torch.compiler.set_stance("force_eager"):
            return torch.autograd.grad(run(), list(self._model.parameters()))


@contextmanager
def _attending(model: Transformer, functions: Sequence[AttentionFunction]) -> Iterator[None]:
    """Every layer with the function named for it, for a while."""
    before = model.functions
    try:
        model.functions = functions
        yield
    finally:
        model.functions = before


class QuantNoise:
    """A controller that decides nothing: to what a probe has measured it adds quant_noise/<layer>/ratio and bias_ratio.

    Args:
        micro_batch_tokens: of one rank's micro-batch.
        noise: comes before it, and knows the noise of the gradients.
    """

    name = "quant_noise"

    def __init__(self, micro_batch_tokens: int, noise: NoiseScale) -> None:
        self._micro_batch_tokens, self._noise = micro_batch_tokens, noise

    def after_step(self, taken: Taken) -> list[Event]:
        """Relate them, if this step had a probe and the noise is known."""
        suffix = "/error_square"
        layers = [key.split("/")[1] for key in taken.metrics if key.startswith("quant_noise/") and key.endswith(suffix)]
        pairs = {
            layer: [taken.metrics[f"quant_noise/{layer}/{what}_square"] for what in ("error", "bias")]
            for layer in layers
        }
        if pairs:
            pairs[ALL] = [sum(pair[i] for pair in pairs.values()) for i in (0, 1)]
        for layer, (error, bias) in pairs.items():
            taken.metrics[f"quant_noise/{layer}/error_square"] = error
            taken.metrics[f"quant_noise/{layer}/bias_square"] = bias
            variance = self._noise.variance(layer)
            if variance is not None and variance > 0:
                left = variance / taken.tokens_per_step
                of_step = bias + (error - bias) * self._micro_batch_tokens / taken.tokens_per_step
                taken.metrics[f"quant_noise/{layer}/ratio"] = of_step / left
                taken.metrics[f"quant_noise/{layer}/bias_ratio"] = bias / left
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
