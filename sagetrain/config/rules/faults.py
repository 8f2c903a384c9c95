"""Rules for runs that begin again by themselves when a rank has died, and that train on while they cannot save."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About, no_effect
from sagetrain.config.schema import RunConfig
from sagetrain.config.sections.base import is_url


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings with which a run cannot begin again by itself, or cannot train on without saving."""
    restarts, tolerated = cfg.training.restarts, cfg.checkpoint.tolerate_minutes
    if restarts and cfg.checkpoint.resume == "never":
        yield About("restarts_resume", "training.restarts", restarts).error(
            "ranks that begin again continue from the newest checkpoint, and checkpoint.resume is never",
            "set checkpoint.resume: auto, or training.restarts: 0",
        )
    sources = (source.path for source in (*cfg.data.train, *cfg.data.valid) if is_url(source.path))
    url = cfg.training.run_url or next(sources, None)
    if restarts and url:
        yield About("restarts_url", "training.restarts", restarts).error(
            f"was tried with files on disks alone, and this run uses {url}",
            "set training.restarts: 0, and let the launcher start the run again (torchrun --max-restarts)",
        )
    if cfg.checkpoint.in_memory_every:
        yield from _in_memory(cfg)
    if tolerated and cfg.training.run_url:
        yield About("tolerate_url", "checkpoint.tolerate_minutes", tolerated).error(
            f"was tried with checkpoints on disks alone, and this run has them in {cfg.training.run_url}",
            "set checkpoint.tolerate_minutes: 0",
        )


def _in_memory(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings with which copies in memory were not tried."""
    parallel, every = cfg.parallel, cfg.checkpoint.in_memory_every
    if cfg.checkpoint.resume == "never":
        yield no_effect("checkpoint.in_memory_every", every, "checkpoint.resume never")
    for key, value, tried in (
        ("parallel.engine", parallel.engine, ("auto", "fsdp")),
        ("parallel.pipeline_parallel_size", parallel.pipeline_parallel_size, (1,)),
        ("parallel.offload", parallel.offload, ("none",)),
        ("training.activation_offload", cfg.training.activation_offload, (False,)),
        ("model.experts", cfg.model.experts and "a mixture", (None,)),
        ("training.run_url", cfg.training.run_url, (None,)),
    ):
        if value not in tried:
            yield About("in_memory_untried", key, value).error(
                "was not tried with checkpoint.in_memory_every",
                f"use {' or '.join(map(str, tried)) if tried != (None,) else 'none'}, or set that to null",
            )
