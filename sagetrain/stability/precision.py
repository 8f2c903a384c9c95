"""The precision ladder: each layer's attention computes less in INT8 from rung to rung.

The lowest rung is attention.recipe, and the others are stability.precision.rungs. Between two steps the rung of a layer
is

    min(highest, max(scheduled, measured) + spikes)

    scheduled   by the tokens seen and the layer's place alone (config/arithmetic.scheduled_rung);
    measured    up by one if the layer's metric is above the threshold, down by one if it is below the lower one,
                and not again before the cool-down is over. Without quantization there is no error, and the metric is 0;
    spikes      how many there were in the last spike_tokens tokens.

A layer's function runs its forward and its backward pass, so both are on one rung. torch.compile builds one graph for
each rung, when the first layer comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sagetrain.config.arithmetic import layers_in_words, scheduled_rung
from sagetrain.config.schema import AttentionConfig, ModelConfig, PrecisionConfig
from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, attention_function
from sagetrain.model.selection import resolve_backend
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.spikes import METRIC as SPIKE


def rungs_of(
    precision: PrecisionConfig | None,
    attention: AttentionConfig,
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, AttentionFunction]:
    """Return the attention functions of all rungs by name, the lowest first. Without a ladder there are none.

    Raises:
        ValueError: one of them cannot run on this device or in this dtype, or its package is not installed.
    """
    functions: dict[str, AttentionFunction] = {}
    for name in (attention.recipe, *precision.rungs) if precision else ():
        settings = {"backend": name} if name in ("sdpa", "flash", "reference") else {"recipe": name}
        settled = attention.model_copy(update=settings)
        try:
            backend, _ = resolve_backend(settled, model, device=device, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"stability.precision.rungs: {name} cannot run here: {error}") from error
        functions[name] = attention_function(backend, settled, device)
    return functions


class _Place(NamedTuple):
    """The three numbers that determine a layer's rung."""

    scheduled: int
    measured: int
    spikes: int


class Ladder:
    """A Controller that gives the layers their attention functions.

    Args:
        precision: the settings that move layers.
        functions: the result of rungs_of.
        layers: the attention of every block, in the order of the model. None: another pipeline stage has the block.
        total_tokens: tokens of the run, for what is scheduled in its last part.
        tokens: tokens seen so far.
    """

    name = "precision"

    def __init__(
        self,
        precision: PrecisionConfig,
        functions: Mapping[str, AttentionFunction],
        layers: Sequence[Attention | None],
        total_tokens: int,
        tokens: int,
    ) -> None:
        self._settings, self._functions, self._layers = precision, dict(functions), layers
        self._names, self._total, self._tokens = list(functions), total_tokens, tokens
        self._spikes: list[int] = []
        self._moved: list[int | None]
        self._places: list[_Place]
        self.restore({})

    @property
    def rungs(self) -> list[str]:
        """The present rung of every layer."""
        return [self._names[self._rung(place)] for place in self._places]

    @property
    def functions(self) -> list[AttentionFunction]:
        """The present attention function of every layer."""
        return [self._functions[rung] for rung in self.rungs]

    def summary(self) -> str:
        """Return the layers of each rung in words, the lowest rung first."""
        rungs = self.rungs
        at = {name: [layer for layer, rung in enumerate(rungs) if rung == name] for name in self._names}
        return "; ".join(f"{name} in {layers_in_words(layers)}" for name, layers in at.items() if layers)

    def _rung(self, place: _Place) -> int:
        return min(len(self._names) - 1, max(place.scheduled, place.measured) + place.spikes)

    def after_step(self, taken: Taken) -> list[Event]:
        """Move layers for the steps to come."""
        self._tokens = taken.tokens
        threshold = self._settings.threshold
        values = dict(self._measurements(threshold.metric, taken.metrics)) if threshold else {}
        for layer, value in values.items():
            self._measure(layer, value)
        if self._settings.spike_tokens and taken.metrics.get(SPIKE, 0.0) > 0:
            self._spikes.append(taken.tokens + self._settings.spike_tokens)
        self._spikes = [end for end in self._spikes if end > taken.tokens]
        before = self._places
        self._set()
        moves: dict[tuple[str, str, str], list[int]] = {}
        for layer, (old, new) in enumerate(zip(before, self._places, strict=True)):
            if self._rung(old) != self._rung(new):
                names = self._names[self._rung(old)], self._names[self._rung(new)]
                moves.setdefault((*names, self._cause(old, new, values.get(layer))), []).append(layer)
        return [
            Event(
                "precision",
                f"attention of {layers_in_words(layers)} from {old} to {new}: {cause}",
                {"layers": layers, "from": old, "to": new, "cause": cause},
            )
            for (old, new, cause), layers in moves.items()
        ]

    def _measurements(self, metric: str, metrics: Mapping[str, float]) -> Iterator[tuple[int, float]]:
        for layer, rung in enumerate(self.rungs):
            if not self._functions[rung].quantized:
                yield layer, 0.0
            elif (value := metrics.get(metric.replace("*", str(layer)))) is not None:
                yield layer, value

    def _measure(self, layer: int, value: float) -> None:
        threshold, place, moved = self._settings.threshold, self._places[layer], self._moved[layer]
        assert threshold, "nothing is measured without one"
        if moved is not None and self._tokens - moved < threshold.cooldown_tokens:
            return
        measured = self._measured[layer]
        if not value <= threshold.above:  # This is also true for NaN.
            measured = min(max(place.scheduled, place.measured) + 1, len(self._names) - 1)
        elif threshold.below is not None and value < threshold.below and place.measured > place.scheduled:
            # Otherwise the error of a higher rung would move the layer below the next one.
            measured -= not place.spikes
        if measured != self._measured[layer]:
            self._measured[layer], self._moved[layer] = measured, self._tokens

    def _cause(self, old: _Place, new: _Place, value: float | None) -> str:
        threshold = self._settings.threshold
        if threshold and old.measured != new.measured:
            side = f"above {threshold.above:g}" if new.measured > old.measured else f"below {threshold.below:g}"
            return f"{threshold.metric} {value:.3g} is {side}"
        if old.spikes != new.spikes:
            words = ("a spike", f"no spike for {self._settings.spike_tokens:,} tokens")
            return words[new.spikes < old.spikes]
        return "schedule"

    def _set(self) -> None:
        count = len(self._layers)
        self._places = [
            _Place(scheduled_rung(self._settings, layer, count, self._tokens, self._total), measured, len(self._spikes))
            for layer, measured in enumerate(self._measured)
        ]
        for layer, rung in zip(self._layers, self.rungs, strict=True):
            if layer is not None and layer.function != self._functions[rung]:
                layer.function = self._functions[rung]

    def state(self) -> dict[str, Any]:
        measured = [self._names[rung] for rung in self._measured]
        return {"measured": measured, "moved": self._moved, "spikes": self._spikes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`. A rung that is not among those of the settings counts as the lowest, and
        moves that the settings no longer make are forgotten. Tokens that were seen stay seen, even if a run goes back
        to a checkpoint."""
        none: list[None] = [None] * len(self._layers)
        names = state.get("measured", none) if self._settings.threshold else none
        self._measured = [self._names.index(name) if name in self._names else 0 for name in names]
        self._moved = list(state.get("moved", none))
        # A run that goes back to a checkpoint knows of more spikes than the checkpoint does.
        self._spikes = sorted({*self._spikes, *state.get("spikes", [])}) if self._settings.spike_tokens else []
        self._set()
