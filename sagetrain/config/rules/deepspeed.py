"""Rules for settings that DeepSpeed does not have."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings that another engine has."""
    parallel, master, reduction = cfg.parallel, cfg.optimizer.master, "parallel.gradient_reduction"
    why, fix = f"parallel.engine is {parallel.engine}", "set parallel.engine: fsdp"
    if parallel.engine == "auto":
        why = f"parallel.engine auto is deepspeed with {reduction}, which only DeepSpeed has"
        fix = f"leave {reduction} out"
    if parallel.zero_stage == 3:
        yield About("zero_3_of_deepspeed", "parallel.zero_stage", 3).error(
            f"is by FSDP2 alone, and {why}", f"{fix} (a checkpoint of either engine continues), or use 0 to 2"
        )
    for rule, key, value, without, how in (
        ("offload_of_deepspeed", "parallel.offload", parallel.offload, "none", ""),
        ("shard_size_of_deepspeed", "parallel.shard_size", parallel.shard_size, None,
         ": DeepSpeed shards over all replicas"),
        ("pipeline_of_engine", "parallel.pipeline_parallel_size", parallel.pipeline_parallel_size, 1, ""),
        ("bf16_masters_need_fsdp", "optimizer.master", master, "fp32", ": DeepSpeed keeps fp32 masters of its own"),
    ):  # fmt: skip
        if value != without:
            yield About(rule, key, value).error(
                f"is for parallel.engine fsdp, and {why}{how}",
                f"{fix}, or use {'null' if without is None else without}",
            )
    if cfg.training.dtype == "bf16" and parallel.zero_stage == 0:
        yield About("zero_0_in_bf16", "parallel.zero_stage", 0).info(
            "runs as stage 1: DeepSpeed's bf16 at stage 0 applies weight decay before training"
        )
    if parallel.gradient_reduction == "bf16" and cfg.training.dtype != "bf16":
        yield About("gradient_reduction_in_fp32", reduction, "bf16").error(
            f"would round the gradients of a run in {cfg.training.dtype}", "use fp32, or training.dtype bf16"
        )
