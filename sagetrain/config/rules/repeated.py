"""Rules for lists that name each thing once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find values that are named twice where once is enough. A second name is a slip for another one."""
    layers = cfg.stability.monitor.layers
    # A negative number counts from the end, and may mean the same layer as a positive one.
    count = cfg.model.num_layers
    places = [] if layers == "all" else [layer + count if -count <= layer < 0 else layer for layer in layers]
    for key, given, values in (
        ("optimizer.muon.adamw_matrices", cfg.optimizer.muon.adamw_matrices, cfg.optimizer.muon.adamw_matrices),
        ("stability.monitor.layers", layers, places),
        ("training.drop_steps", cfg.training.drop_steps, cfg.training.drop_steps),
        ("evaluation.tasks", cfg.evaluation.tasks, cfg.evaluation.tasks),
        ("guidance.override", cfg.guidance.override, cfg.guidance.override),
    ):
        for value, times in Counter[object](values).items():
            if times > 1:
                yield About("named_twice", key, given).error(f"names {value} {times} times", "name it once")
