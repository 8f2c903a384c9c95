"""Keys that earlier versions of the configuration had: what a file that still has them is told, and how the config.yaml
of an earlier run is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from sagetrain.config.yaml_nodes import KeyPath


class FormerKey(NamedTuple):
    """A key that is gone."""

    path: KeyPath
    why: str
    fix: str
    """The advice that says what to write instead."""


FORMER = (
    FormerKey(
        ("stability", "precision"),
        "attention.recipe scores and fine cost nothing that a precision ladder could win back (results/remedies)",
        "write attention.recipe: scores (fine on GPUs other than Hopper), or attention.backend: sdpa for 16 bits",
    ),
    FormerKey(
        ("stability", "qk_gain"),
        "growing gains of QK-norm do not cause what INT8 costs (results/capped-gains)",
        "leave it out",
    ),
    FormerKey(
        ("parallel", "gather_8_bits"),
        "weights gathered in 8 bits at ZeRO 3 made 3B 0.98 times as fast (results/engines)",
        "leave it out",
    ),
    FormerKey(
        ("optimizer", "muon", "adamw_lr"),
        "learning rates belong to kinds of tensors now",
        "write optimizer.lr_of: {embedding: ..., head: ..., gain: ...}",
    ),
)


def take_out(tree: Any) -> list[tuple[FormerKey, Any]]:
    """Take the former keys out of a configuration's tree. Return those that were set to something, with their values.
    Files written by earlier versions name every key, and nothing has to be said of one that did nothing."""
    found = []
    for key in FORMER:
        *above, last = key.path
        section = tree
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            value = section.pop(last)
            if not _idle(value):
                found.append((key, value))
    return found


def _idle(value: Any) -> bool:
    """Whether a former key, or a whole section of keys, had the value that did nothing."""
    return all(map(_idle, value.values())) if isinstance(value, dict) else value in (None, 0)
