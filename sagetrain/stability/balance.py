"""Keep the experts of a mixture evenly loaded, by what a step has counted.

The routers count in their backward passes: the gradients of their states are numbers of tokens (model/moe.py). Here
they leave the gradients, become a vector of all layers and experts on every rank, and move the states behind the
update: `bias` by the sign of what an expert lacks, `load` to what the auxiliary loss of the next step reads. A step
that is left out moves neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from sagetrain.config.schema import ModelConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.controller import Event, Taken

VECTOR = "moe/loads"
"""The vector of a step's loads in the metrics: [layers with experts x experts]."""

_STARVES = 0.1
"""An expert starves if it has less than this part of the mean load."""
_PATIENCE = 100
"""The steps in a row after which a layer with a starving expert is reported."""


class Balance:
    """The loads of a model's experts in a step, and what they move.

    Args:
        specs: the entries of all tensors of the model, by name.
        masters: this rank's rows of each state, by name; empty where it has none.
        starts: the first of these rows, by name.
        counts: whether this rank's rows of a tensor count, and not those of another rank that has the same.
        divisor: the number that the gradients' sums over ranks were divided by.
    """

    def __init__(
        self,
        model: ModelConfig,
        specs: Mapping[str, TensorSpec],
        masters: Mapping[str, Tensor],
        starts: Mapping[str, int],
        counts: Callable[[str], bool],
        divisor: int,
        metrics: Metrics,
    ) -> None:
        assert model.experts is not None
        self._rate, self._experts = model.experts.balance.bias_rate, model.experts.number
        self._masters, self._starts, self._counts = masters, starts, counts
        self._divisor, self._metrics = divisor, metrics
        self.names = [name for name, spec in specs.items() if spec.kind == "state"]
        """The names of all states."""
        self._layers = sorted({int(specs[name].layer) for name in self.names})
        self._loads = torch.empty(0)

    def take(self, gradients: MutableMapping[str, Tensor]) -> None:
        """Take the loads out of a step's gradients, and add them to its metrics."""
        taken = {name: gradients.pop(name) for name in self.names if name in gradients}
        device = next(iter(taken.values())).device if taken else None
        loads = torch.zeros(len(self._layers), self._experts, dtype=torch.float64, device=device)
        for row, layer in zip(loads, self._layers, strict=True):
            name = _name(layer, "bias")
            if name in taken and self._counts(name):
                first = self._starts[name]
                row[first : first + len(taken[name])] = taken[name].double() * self._divisor
        self._metrics.vector(VECTOR, loads)

    def numbers(self) -> dict[str, float]:
        """Return the step's numbers for people, when its metrics are reduced: for each layer with experts the largest
        and the least load over the mean, and the entropy of the loads as a part of the largest possible one."""
        self._loads = self._metrics.vectors[VECTOR].view(len(self._layers), -1).round()
        found: dict[str, float] = {}
        for layer, loads in zip(self._layers, self._loads, strict=True):
            shares = loads / loads.sum()
            found[f"moe/{layer}/max_load"] = float(shares.max()) * self._experts
            found[f"moe/{layer}/min_load"] = float(shares.min()) * self._experts
            found[f"moe/{layer}/entropy"] = float(torch.special.entr(shares).sum()) / math.log(self._experts)
        found["moe/max_load"] = max(found[f"moe/{layer}/max_load"] for layer in self._layers)
        return found

    @torch.no_grad()
    def update(self) -> None:
        """Move the states by the step's loads, behind an update that was made."""
        for layer, loads in zip(self._layers, self._loads, strict=True):
            mean = loads.sum() / self._experts
            self._own(layer, "bias", lambda bias, lacks: bias.add_(lacks.sign(), alpha=self._rate), mean - loads)
            self._own(layer, "load", Tensor.copy_, loads / mean - 1)

    def _own(self, layer: int, kind: str, write: Callable[[Tensor, Tensor], Any], values: Tensor) -> None:
        """Write this rank's rows of a state, from the values of all experts."""
        master, first = self._masters[_name(layer, kind)], self._starts[_name(layer, kind)]
        if len(master):
            write(master, values[first : first + len(master)].to(master))


def _name(layer: int, kind: str) -> str:
    return f"blocks.{layer}.mlp.router.{kind}"


class Starving:
    """A controller that decides nothing. It reports each layer in which experts starve for long, once."""

    name = "starving"

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def after_step(self, taken: Taken) -> list[Event]:
        """Report the layers in which some expert has had too few tokens in every one of the last steps."""
        found: dict[str, float] = {}
        for metric, least in taken.metrics.items():
            layer, mark, _ = metric.removeprefix("moe/").partition("/min_load")
            if mark:
                # A layer that was reported stays above the number that is reported.
                before = self._steps.get(layer, 0)
                self._steps[layer] = before + 1 if least < _STARVES or before >= _PATIENCE else 0
                if self._steps[layer] == _PATIENCE:
                    found[layer] = least
        if not found:
            return []
        layers = ", ".join(found)
        text = (
            f"experts starve: in each of the last {_PATIENCE} steps an expert of layer {layers} had less than "
            f"{_STARVES:.0%} of the mean number of tokens; raise model.experts.balance.bias_rate or aux_weight"
        )
        return [Event(self.name, text, {"min_load": found})]

    def state(self) -> dict[str, Any]:
        return {"steps": dict(self._steps)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps = dict(state.get("steps", {}))
