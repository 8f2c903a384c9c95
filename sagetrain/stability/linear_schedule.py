"""Linear layers in 8 bits up to the last part of a run, which is in 16 (linear.keep_last_fraction).

About half of what FP8 costs in loss is what rounding does to the finished model's forward pass
(docs/low-bit-linear.md): weights that settle in 16 bits are those that are evaluated and exported. When is a pure
function of the tokens seen. torch.compile makes other graphs of the blocks at the move, and none before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagetrain.config.arithmetic import last_part, low_bit_linear
from sagetrain.config.schema import LinearConfig
from sagetrain.model.transformer import Transformer
from sagetrain.stability.controller import Event, Taken


class LinearSchedule:
    """A Controller that lets linear layers multiply in 16 bits when it is time. It has nothing to remember: tokens that
    were seen stay seen, also where a run goes back to a checkpoint.

    Args:
        settings: with nothing left `auto`, and a keep_last_fraction.
        model: its layers are in 8 bits as the settings say.
        total_tokens: of the run.
        tokens: seen so far.
    """

    name = "linear"

    def __init__(self, settings: LinearConfig, model: Transformer, total_tokens: int, tokens: int) -> None:
        self._settings, self._model, self._total, self._low = settings, model, total_tokens, True
        self._moves(tokens)

    def summary(self) -> str:
        """Where the run is, in words."""
        until = f"{last_part(self._settings.keep_last_fraction or 0.0, self._total):,} of {self._total:,} tokens"
        return f"{self._settings.precision} up to {until}" if self._low else f"16 bits since {until}"

    def after_step(self, taken: Taken) -> list[Event]:
        """Move all layers, if it is time."""
        if taken.tokens >= self._total or not self._moves(taken.tokens):
            return []
        old, new = f"{self._settings.precision} {self._settings.recipe}", "16 bits"
        text = f"linear layers from {old} to {new}: linear.keep_last_fraction {self._settings.keep_last_fraction}"
        return [Event("precision", text, {"linear": True, "from": old, "to": new, "cause": "schedule"})]

    def _moves(self, tokens: int) -> bool:
        """Whether the step after so many tokens is the first in 16 bits, which it is made to be."""
        if not self._low or low_bit_linear(self._settings, tokens, self._total):
            return False
        self._low = False
        self._model.use_16_bits()
        return True

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
