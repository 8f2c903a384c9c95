"""Rules for runs that begin again by themselves when a rank has died, and that train on while they cannot save."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About, no_effect, not_proven
from sagetrain.config.schema import RunConfig

WITH_COPIES_IN_MEMORY: dict[str, tuple[object, ...]] = {
    "parallel.engine": ("auto", "fsdp"),
    "parallel.gradient_reduction": ("fp32",),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.offload": ("none",),
    "training.activation_offload": (False,),
    "model.experts": (None,),
}
"""The values that were proven with checkpoint.in_memory_every."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings with which a run cannot begin again by itself, or cannot train on without saving."""
    restarts, tolerated = cfg.training.restarts, cfg.checkpoint.tolerate_minutes
    if restarts and cfg.checkpoint.resume == "never":
        yield About("restarts_resume", "training.restarts", restarts).error(
            "ranks that begin again continue from the newest checkpoint, and checkpoint.resume is never",
            "set checkpoint.resume: auto, or training.restarts: 0",
        )
    if every := cfg.checkpoint.in_memory_every:
        key = "checkpoint.in_memory_every"
        if cfg.checkpoint.resume == "never":
            yield no_effect(key, every, "checkpoint.resume never")
        yield from not_proven(cfg, WITH_COPIES_IN_MEMORY, "in_memory_untried", key, f"{key}: null")
    if tolerated and cfg.training.run_url:
        yield About("tolerate_url", "checkpoint.tolerate_minutes", tolerated).error(
            f"was tried with checkpoints on disks alone, and this run has them in {cfg.training.run_url}",
            "set checkpoint.tolerate_minutes: 0",
        )
