"""Linear layers in 8 bits up to the last part of a run, which is in 16 (linear.keep_last_fraction).

About half of what FP8 costs in loss is what rounding does to the finished model's forward pass
(docs/low-bit-linear.md): weights that settle in 16 bits are those that are evaluated and exported. When is a pure
function of the tokens seen. torch.compile makes other graphs of the blocks at the move, and none before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sagetrain.config.arithmetic import last_part, low_bit_linear
from sagetrain.config.schema import LinearConfig
from sagetrain.model.transformer import Transformer
from sagetrain.stability.controller import Event, Taken


class LinearSchedule:
    """A Controller that hands linear layers how they multiply.

    Args:
        settings: with nothing left `auto`.
        model: its layers are in 8 bits as the settings say.
        renew: makes what layers in 8 bits keep of their weights.
        total_tokens: of the run.
        tokens: seen so far.
    """

    name = "linear"

    def __init__(
        self, settings: LinearConfig, model: Transformer, renew: Callable[[], None], total_tokens: int, tokens: int
    ) -> None:
        self._settings, self._model, self._renew, self._total = settings, model, renew, total_tokens
        self._matmuls, self._low, self._fraction = model.matmuls, True, settings.keep_last_fraction or 0.0
        self._move(tokens)

    def summary(self) -> str:
        """Where the run is, in words."""
        until = f"{last_part(self._fraction, self._total):,} of {self._total:,} tokens"
        return f"{self._settings.precision} up to {until}" if self._low else f"16 bits since {until}"

    def after_step(self, taken: Taken) -> list[Event]:
        """Move all layers, if it is time."""
        if not self._move(taken.tokens):
            return []
        ways = "16 bits", f"{self._settings.precision} {self._settings.recipe}"
        old, new = ways[not self._low], ways[self._low]
        text = f"linear layers from {old} to {new}: linear.keep_last_fraction {self._fraction:g}"
        return [Event("precision", text, {"linear": True, "from": old, "to": new, "cause": "schedule"})]

    def _move(self, tokens: int) -> bool:
        """Whether a step after so many tokens is in other bits than the one before."""
        self._tokens, low = tokens, low_bit_linear(self._settings, tokens, self._total)
        if moved := low != self._low:
            self._model.matmuls, self._low = self._matmuls if low else [{}] * len(self._matmuls), low
            self._renew()
        return moved

    def state(self) -> dict[str, Any]:
        return {"tokens": self._tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A run that goes back to a checkpoint goes back to its precision."""
        self._move(state.get("tokens", self._tokens))
