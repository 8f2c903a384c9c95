"""Rules for settings that DeepSpeed does not have."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig


def by_deepspeed(cfg: RunConfig) -> tuple[str, str]:
    """Say why a run is by DeepSpeed, and what makes it one by FSDP2, for a setting that DeepSpeed does not have."""
    if cfg.parallel.engine != "auto":
        return f"parallel.engine is {cfg.parallel.engine}", "set parallel.engine: fsdp"
    key = "parallel.gradient_reduction"
    return f"parallel.engine auto is deepspeed with {key}, which only DeepSpeed has", f"leave {key} out"


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings that another engine has."""
    why, fix = by_deepspeed(cfg)
    if cfg.parallel.zero_stage == 3:
        yield About("zero_3_of_deepspeed", "parallel.zero_stage", 3).error(
            f"is by FSDP2 alone, and {why}", f"{fix} (a checkpoint of either engine continues), or use 0 to 2"
        )
    if cfg.parallel.offload != "none":
        yield About("offload_of_deepspeed", "parallel.offload", cfg.parallel.offload).error(
            f"is for parallel.engine fsdp, and {why}", f"{fix}, or set offload: none"
        )
    if cfg.parallel.shard_size is not None:
        yield About("shard_size_of_deepspeed", "parallel.shard_size", cfg.parallel.shard_size).error(
            f"is for parallel.engine fsdp, and {why}: DeepSpeed shards over all replicas", f"remove it, or {fix}"
        )
    if cfg.training.dtype == "bf16" and cfg.parallel.zero_stage == 0:
        yield About("zero_0_in_bf16", "parallel.zero_stage", 0).info(
            "runs as stage 1: DeepSpeed's bf16 at stage 0 applies weight decay before training"
        )
    if cfg.parallel.gradient_reduction == "bf16" and cfg.training.dtype != "bf16":
        yield About("gradient_reduction_in_fp32", "parallel.gradient_reduction", "bf16").error(
            f"would round the gradients of a run in {cfg.training.dtype}", "use fp32, or training.dtype bf16"
        )
