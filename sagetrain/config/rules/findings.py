"""How the rules say what they have found."""

from __future__ import annotations

from sagetrain.config.errors import Finding


def error(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    """A setting that cannot run."""
    return Finding(rule, "error", key, value, message, fix)


def warning(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    """A setting that runs, but hardly as meant."""
    return Finding(rule, "warning", key, value, message, fix)


def no_effect(key: str, value: object, why: str) -> Finding:
    """A setting that does nothing in this combination."""
    return warning("no_effect", key, value, f"has no effect with {why}", "remove it, or change what it goes with")


def divisors(number: int) -> str:
    """The sizes that divide it, for a fix."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def neighbours(value: int, multiple: int) -> str:
    """The nearest allowed values, for a fix: `512 or 768`."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
