"""What configuration checks report: findings, and the one exception that carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """A mistake in the user's configuration; the message names file, key, value, rule and fix."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say about a configuration."""

    rule: str
    """Name of the rule; guidance.override takes the names of the guidance rules."""
    level: Literal["error", "warning", "info"]
    key: str
    """Dotted key that the finding is about."""
    value: Any
    """Its value in this run."""
    message: str
    """What is wrong, with the numbers."""
    fix: str = ""
    """What to do about it."""
    source: str = ""
    """Where the rule comes from: a paper and section, or the library that sets the limit."""

    def __str__(self) -> str:
        text = f"{self.key} = {self.value!r}: {self.message} [{self.rule}]" if self.key else self.message
        return (
            text
            + (f"\n    fix: {self.fix}" if self.fix else "")
            + (f"\n    source: {self.source}" if self.source else "")
        )
