"""What is measured of a run's stability while it trains, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import no_effect
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Measurements that there is nothing to take of."""
    yield from _noise_scale(cfg)


def _noise_scale(cfg: RunConfig) -> Iterator[Finding]:
    noise, micro_batch = cfg.stability.noise_scale, cfg.data.micro_batch_size * cfg.data.seq_length
    asked = noise.every_steps if "every_steps" in noise.model_fields_set else None
    if asked and max(cfg.tokens_per_step.named_tokens.values()) <= micro_batch:
        why = f"steps of one micro-batch of {micro_batch} tokens: there is nothing to compare it with"
        yield no_effect("stability.noise_scale.every_steps", asked, why)
