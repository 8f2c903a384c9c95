"""Linear layers in 16 bits in the first and the last part of a run (linear.keep_first_fraction, keep_last_fraction),
and in 8 bits between them.

The loss that INT8 costs from the first token on is probably lost where the loss falls fastest (results/int8-warm-up).
About half of what FP8 costs comes from rounding in the finished model's forward pass (docs/low-bit-linear.md), so
weights that settle in 16 bits are those that are evaluated and exported. The schedule is a pure function of the tokens
seen. torch.compile builds other graphs of the blocks at a move, and none before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sagetrain.config.arithmetic import low_bit_linear, low_bit_part
from sagetrain.config.schema import LinearConfig
from sagetrain.model.transformer import Transformer
from sagetrain.stability.controller import Controller, Event, Taken


class LinearSchedule(Controller):
    """A controller that lets linear layers multiply in 16 or 8 bits by the schedule. It has nothing to remember: tokens
    that were seen stay seen, even if a run goes back to a checkpoint.

    Args:
        settings: settings without `auto`, and with a part in 16 bits.
        model: the model, with its layers in 8 bits as the settings say.
        renew: rebuilds what layers in 8 bits keep of their weights (Engine.weights_changed).
    """

    name = "linear"

    def __init__(
        self, settings: LinearConfig, model: Transformer, renew: Callable[[], None], total_tokens: int, tokens: int
    ) -> None:
        self._settings, self._model, self._renew, self._total, self._low = settings, model, renew, total_tokens, True
        self._matmuls = model.matmuls
        self._moves(tokens)

    def summary(self) -> str:
        """Return the present precision and its part of the run, in words."""
        now = self._settings.precision if self._low else "16 bits"
        bounds = 0, *low_bit_part(self._settings, self._total)
        since = max(bound for bound in bounds if bound <= self._tokens)
        until = min((bound for bound in bounds if bound > self._tokens), default=math.inf)
        words = [f"since {since:,}"] * bool(since) + [f"up to {until:,}"] * (until < math.inf)
        return f"{now} {', '.join(words)} of {self._total:,} tokens"

    def after_step(self, taken: Taken) -> list[Event]:
        """Move all layers if it is time."""
        if taken.tokens >= self._total or not self._moves(taken.tokens):
            return []
        settings, old, new = self._settings, "16 bits", str(self._settings.precision)
        why = f"linear.keep_first_fraction {settings.keep_first_fraction}"
        if not self._low:
            old, new, why = new, old, f"linear.keep_last_fraction {settings.keep_last_fraction}"
        text = f"linear layers from {old} to {new}: {why}"
        return [Event("precision", text, {"linear": True, "from": old, "to": new, "cause": "schedule"})]

    def _moves(self, tokens: int) -> bool:
        """Set the precision of the step that begins when `tokens` have been seen. Returns True if it differs from the
        step before."""
        self._tokens, before = tokens, self._low
        self._low = low_bit_linear(self._settings, tokens, self._total)
        if self._low == before:
            return False
        if self._low:
            self._model.matmuls = self._matmuls
            self._renew()
        else:
            self._model.use_16_bits()
        return True
