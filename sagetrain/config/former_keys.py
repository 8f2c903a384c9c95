"""Keys that earlier versions of the configuration had: what a file that still has them is told, and how the config.yaml
of an earlier run is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from sagetrain.config.yaml_nodes import KeyPath


class FormerKey(NamedTuple):
    """A key that is gone, or some of its values."""

    path: KeyPath
    why: str
    fix: str
    """The advice that says what to write instead."""
    idle: Any = None
    """The value beside None, False and 0 with which the key did nothing that is not done now."""
    values: tuple[str, ...] = ()
    """The values that are gone, if the key is still there."""


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
        ("deepspeed",),
        "further keys of DeepSpeed made no run as fast as parallel.engine fsdp (results/gradients, results/engines)",
        "leave it out: SageTrain writes all of DeepSpeed's configuration",
    ),
    FormerKey(
        ("attention", "recipe"),
        "where scores are large INT8 in the products of the gradients alone erred less than other recipes, and 16 bits "
        "err less still",
        "write attention.backend: sdpa for 16 bits, or recipe: scores",
        values=("gradients",),
    ),
    FormerKey(
        ("attention", "smooth_q"),
        "a mean that is taken from queries before they are quantized brought the papers' runs no gain, and ours none "
        "that is decided (results/smoothing)",
        "leave it out",
    ),
    FormerKey(
        ("linear", "recipe"),
        "each row of a matrix has a scale, and all products are in 8 bits: one scale for a matrix gained no time, and "
        "gradients of weights in 16 bits no loss (results/linear-layers)",
        "leave it out; linear.precision bf16 is 16 bits",
        idle="rowwise",
    ),
    FormerKey(
        ("optimizer", "muon", "adamw_lr"),
        "learning rates belong to kinds of tensors now",
        "write optimizer.lr_of: {embedding: ..., head: ..., gain: ...}",
    ),
)


def take_out(tree: Any, values: bool = True) -> list[tuple[FormerKey, Any]]:
    """Take the former keys out of a configuration's tree, and with `values` former values of keys that are still there.
    Return the keys that were set to something, with their values. Files written by earlier versions name every key, and
    nothing has to be said of one that did nothing."""
    found = []
    for key in FORMER if values else (key for key in FORMER if not key.values):
        *above, last = key.path
        section = tree
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section and (not key.values or section[last] in key.values):
            value = section.pop(last)
            if not _idle(value) and value != key.idle:
                found.append((key, value))
    return found


def _idle(value: Any) -> bool:
    """Whether a former key, or a whole section of keys, had the value that did nothing."""
    return all(map(_idle, value.values())) if isinstance(value, dict) else value in (None, 0)
