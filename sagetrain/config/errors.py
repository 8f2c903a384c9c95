"""The exceptions that a user meets, and the findings of configuration checks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

TRAINING_EXIT_CODE = 4
"""Exit code of a run whose training cannot go on: a step that went wrong, or no more memory."""


class ConfigError(ValueError):
    """A mistake in the user's configuration; the message names file, key, value, rule and fix."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used; the message names the folder and the way out."""


class TrainingError(RuntimeError):
    """Training cannot go on (non-finite loss, say); the newest checkpoint is untouched."""


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
    """Where the rule comes from: a paper and section."""
    where: str = ""
    """`file:line` or the override that gave the key, when known."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        lines = [f"{place}{self.key} = {shown(self.value)}: {self.message} [{self.rule}]"]
        lines += [f"    {name}: {text}" for name, text in (("fix", self.fix), ("source", self.source)) if text]
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as it would stand in YAML, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
