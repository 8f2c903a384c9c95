"""Keep the experts of a mixture evenly loaded, by what a step has counted.

The routers count in their backward passes: the gradients of their states are numbers of tokens (model/moe.py). Here
they leave the gradients, become a vector of all layers and experts on every rank, and move the states behind the
update: `bias` by the sign of what an expert lacks, `load` to what the auxiliary loss of the next step reads. A step
that is left out moves neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagetrain.config.errors import some
from sagetrain.config.schema import ModelConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.controller import Controller, Event, Taken

VECTOR = "moe/loads"
"""The vector of a step's loads in the metrics: [layers with experts x experts]."""

_STARVES = 0.1
"""An expert starves if it has less than this part of the mean load."""
_PATIENCE = 100
"""The steps in a row after which a starving expert is reported."""
_NAMED = 8
"""The most experts of a layer that a report names."""


class Spread(NamedTuple):
    """The evenness of the choices of a layer."""

    largest: float
    """The load of the fullest expert over the mean."""
    least: float
    """The load of the emptiest expert over the mean."""
    entropy: float
    """The entropy of the experts' shares as a part of the largest possible one."""

    @classmethod
    def of(cls, loads: Tensor) -> Spread:
        """Return the spread of the loads of all experts, fp64 on the CPU."""
        shares, experts = loads / loads.sum(), len(loads)
        entropy = float(torch.special.entr(shares).sum()) / math.log(experts)
        return cls(float(shares.max()) * experts, float(shares.min()) * experts, entropy)


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
            spread = Spread.of(loads)
            found[f"moe/{layer}/max_load"], found[f"moe/{layer}/min_load"] = spread.largest, spread.least
            found[f"moe/{layer}/entropy"] = spread.entropy
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


class Starving(Controller):
    """A controller that decides nothing. It reports each expert that starves for long, once.

    Args:
        metrics: the numbers of the steps, with the loads as a vector.
    """

    name = "starving"

    def __init__(self, metrics: Metrics, experts: int) -> None:
        self._metrics, self._experts = metrics, experts
        self._steps: dict[str, int] = {}
        """The steps in a row, by layer/expert. An expert that was reported keeps the number at which it was."""

    def after_step(self, taken: Taken) -> list[Event]:
        """Report the experts that had too few tokens in every one of the last steps."""
        least = (name.split("/") for name in taken.metrics if name.startswith("moe/"))
        layers = sorted(int(name[1]) for name in least if name[-1] == "min_load")
        if not layers or VECTOR not in self._metrics.vectors:
            return []
        loads = self._metrics.vectors[VECTOR].view(-1, self._experts)
        hungry = loads < _STARVES * loads.mean(1, keepdim=True)
        before, self._steps = self._steps, {key: _PATIENCE for key, steps in self._steps.items() if steps >= _PATIENCE}
        found: dict[str, list[int]] = {}
        for row, expert in hungry.nonzero().tolist():
            key = f"{layers[row]}/{expert}"
            if key not in self._steps:
                self._steps[key] = before.get(key, 0) + 1
                if self._steps[key] == _PATIENCE:
                    found.setdefault(str(layers[row]), []).append(expert)
        if not found:
            return []
        named = "; ".join(f"layer {layer}: {some(experts, _NAMED)}" for layer, experts in found.items())
        text = (
            f"experts starve: in each of the last {_PATIENCE} steps they had less than {_STARVES:.0%} of the mean "
            f"number of tokens ({named}); raise model.experts.balance.bias_rate or aux_weight"
        )
        return [Event(self.name, text, {"experts": found})]

    def state(self) -> dict[str, Any]:
        return {"steps": dict(self._steps)}

    def restore(self, state: Mapping[str, Any]) -> None:
        # Earlier versions counted the steps of whole layers.
        self._steps = {key: steps for key, steps in state.get("steps", {}).items() if "/" in key}
