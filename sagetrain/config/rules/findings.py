"""Constructors for findings, and texts for their fixes."""

from __future__ import annotations

from sagetrain.config.errors import Finding
from sagetrain.config.sections.base import Section


def error(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    """Build the finding for a setting that cannot run."""
    return Finding(rule, "error", key, value, message, fix)


def warning(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    """Build the finding for a setting that runs, but hardly as intended."""
    return Finding(rule, "warning", key, value, message, fix)


def no_effect(key: str, value: object, why: str) -> Finding:
    """Build the finding for a setting that does nothing in this combination."""
    return warning("no_effect", key, value, f"has no effect with {why}", "remove it, or change what it goes with")


def also_without(section: Section, path: str, *names: str) -> str:
    """Return an addition to a fix that switches a part of a section off: the keys of that part, which would have no
    effect then. The text is empty if they have their defaults."""
    fields = type(section).model_fields
    idle = [f"{path}.{name}" for name in names if getattr(section, name) != fields[name].get_default()]
    return f" (and leave out {', '.join(idle)})" if idle else ""


def divisors(number: int) -> str:
    """Return the divisors of a number as text, for a fix."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def neighbours(value: int, multiple: int) -> str:
    """Return the nearest allowed values as text, for a fix: `512 or 768`."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
