"""The rules that say which configurations run on how many ranks. Each module is a generator of findings."""

from __future__ import annotations

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules import (
    delta_net,
    engine,
    experts,
    gather,
    layout,
    linear,
    model,
    optimizer,
    pipeline,
    repeated,
    schedule,
    stability,
)
from sagetrain.config.schema import RunConfig


def fit(cfg: RunConfig, world_size: int, vocab_size: int | None = None) -> list[Finding]:
    """Return what cannot run on `world_size` ranks (errors), and settings without effect (warnings). The tokenizer's
    vocabulary size counts when it is known."""
    where = Layout.of(cfg, world_size)
    return [
        *model.findings(cfg),
        *experts.findings(cfg, where),
        *delta_net.findings(cfg),
        *linear.findings(cfg),
        *layout.findings(cfg, where, vocab_size),
        *gather.findings(cfg, where),
        *pipeline.findings(cfg, where),
        *schedule.findings(cfg, where),
        *optimizer.findings(cfg, where),
        *engine.findings(cfg, where),
        *stability.findings(cfg, where),
        *repeated.findings(cfg),
    ]
