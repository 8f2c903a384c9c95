"""Constructors for findings, and texts for their fixes."""

from __future__ import annotations

from typing import NamedTuple

from sagetrain.config.errors import Finding
from sagetrain.config.schema import EvaluationConfig


class About(NamedTuple):
    """The beginning of a finding: the rule, and the setting that it is about. The methods say the rest."""

    rule: str
    key: str
    value: object

    def error(self, message: str, fix: str, source: str = "") -> Finding:
        """Build the finding for a setting that cannot run."""
        return Finding(self.rule, "error", self.key, self.value, message, fix, source)

    def warning(self, message: str, fix: str, source: str = "") -> Finding:
        """Build the finding for a setting that runs, but hardly as intended."""
        return Finding(self.rule, "warning", self.key, self.value, message, fix, source)

    def info(self, message: str, fix: str = "", source: str = "") -> Finding:
        """Build the finding for a setting that runs, and of which something is to be known."""
        return Finding(self.rule, "info", self.key, self.value, message, fix, source)


def no_effect(key: str, value: object, why: str) -> Finding:
    """Build the finding for a setting that does nothing in this combination."""
    return About("no_effect", key, value).warning(f"has no effect with {why}", "remove it, or change what it goes with")


def samples_off(asked: EvaluationConfig) -> str:
    """Return the setting that switches samples off, as a fix says it, with the keys that would have no effect then."""
    default = EvaluationConfig()
    names = ("samples_prompts", "samples_tokens")
    idle = [f"evaluation.{name}" for name in names if getattr(asked, name) != getattr(default, name)]
    also = f" (and leave out {', '.join(idle)})" if idle else ""
    return f"evaluation.samples_every_tokens: null{also}"


def divisors(number: int) -> str:
    """Return the divisors of a number as text, for a fix."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def neighbours(value: int, multiple: int) -> str:
    """Return the nearest allowed values as text, for a fix: `512 or 768`."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
