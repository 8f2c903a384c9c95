"""Constructors for findings, and texts for their fixes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from math import lcm
from typing import NamedTuple, cast

from sagetrain.config.errors import Finding, Level
from sagetrain.config.schema import EvaluationConfig, ModelConfig, RunConfig
from sagetrain.config.sections.base import Section


class About(NamedTuple):
    """The beginning of a finding: the rule, and the setting that it is about. The methods say the rest."""

    rule: str
    key: str
    value: object

    def found(self, level: Level, message: str, fix: str = "", source: str = "") -> Finding:
        """Build the finding. An error cannot run, a warning runs, but hardly as intended, and something is to be known
        of an info."""
        return Finding(self.rule, level, self.key, self.value, message, fix, source)

    def error(self, message: str, fix: str, source: str = "") -> Finding:
        return self.found("error", message, fix, source)

    def warning(self, message: str, fix: str, source: str = "") -> Finding:
        return self.found("warning", message, fix, source)

    def info(self, message: str, fix: str = "", source: str = "") -> Finding:
        return self.found("info", message, fix, source)


def no_effect(key: str, value: object, why: str) -> Finding:
    """Build the finding for a setting that does nothing in this combination."""
    return About("no_effect", key, value).warning(f"has no effect with {why}", "remove it, or change what it goes with")


def not_proven(
    cfg: RunConfig, proven: Mapping[str, tuple[object, ...]], rule: str, feature: str, without: str
) -> Iterator[Finding]:
    """Find the settings that were not proven with a feature.

    Args:
        proven: the proven values of each key. Other values are errors.
        without: what goes without the feature, as a fix says it.
    """
    for key, values in proven.items():
        value = functools.reduce(getattr, key.split("."), cast(object, cfg))
        if value not in values:
            others = map(spelled, values)
            why, fix = f"was not proven with {feature} yet", f"use {' or '.join(map(str, others))}, or {without}"
            yield About(rule, key, "a section of its own" if isinstance(value, Section) else value).error(why, fix)


def spelled(value: object) -> object:
    """Return a value as a fix names it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def samples_off(asked: EvaluationConfig) -> str:
    """Return the setting that switches samples off, as a fix says it, with the keys that would have no effect then."""
    default = EvaluationConfig()
    names = ("samples_prompts", "samples_tokens")
    idle = [f"evaluation.{name}" for name in names if getattr(asked, name) != getattr(default, name)]
    also = f" (and leave out {', '.join(idle)})" if idle else ""
    return f"evaluation.samples_every_tokens: null{also}"


def divisors(number: int, most: int | None = None) -> str:
    """Return the divisors of a number, those up to `most`, as text for a fix."""
    return ", ".join(str(d) for d in range(1, min(number, most or number) + 1) if number % d == 0)


def nearest(value: int, multiple: int) -> list[int]:
    """Return the nearest multiples above 0, at most one on either side."""
    below = value // multiple * multiple
    return [number for number in (below, below + multiple) if number]


def neighbours(value: int, multiple: int) -> str:
    """Return the nearest allowed values as text, for a fix: `512 or 768`."""
    return " or ".join(map(str, nearest(value, multiple)))


def hidden_sizes(model: ModelConfig) -> str:
    """Return the nearest values of model.hidden_size that all rules take, as text for a fix."""
    of_heads = 1 if "head_dim" in model.model_fields_set else 2 * model.num_attention_heads
    return neighbours(model.hidden_size, lcm(16, of_heads))
