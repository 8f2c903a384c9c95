"""Rules for the engine."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, no_effect, not_proven
from sagetrain.config.schema import RunConfig

WITH_ACTIVATIONS_ON_HOST: dict[str, tuple[object, ...]] = {
    "training.activation_checkpointing": ("full", "attention"),
    "training.compile": ("auto", "on"),
    "parallel.engine": ("fsdp", "auto"),
    "parallel.gradient_reduction": ("fp32",),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.offload": ("none",),
    "model.experts": (None,),
    "stability.quant_noise.every_steps": (None,),
    "stability.replay.every_steps": (None,),
}
"""The values that were proven with training.activation_offload, of each key that asks for it. Other values are errors.
A proof opens a value here, or removes the line if all values have one."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Find settings that the engine does not have."""
    refusal = layout.not_recorded if cfg.training.cuda_graphs == "on" else None
    if refusal:
        why = f"micro-steps cannot be CUDA graphs: {refusal.key} is {refusal.value}, where {refusal.why}"
        yield About("cuda_graphs_off", "training.cuda_graphs", "on").error(
            why, f"{refusal.fix}, or set cuda_graphs: auto"
        )
    if cfg.training.activation_offload:
        feature, without = "training.activation_offload", "activation_offload: false"
        yield from not_proven(cfg, WITH_ACTIVATIONS_ON_HOST, "activations_not_offloaded", feature, without)
    if layout.engine == "deepspeed":
        yield from _deepspeed(cfg)
        return
    yield from _fsdp(cfg)
    yield from _offload(cfg)


def _deepspeed(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings that DeepSpeed does not have."""
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


def _fsdp(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings that torch's FSDP2 does not have."""
    if cfg.parallel.gradient_reduction == "bf16":
        yield About("gradient_reduction_of_fsdp", "parallel.gradient_reduction", "bf16").error(
            "would also add up micro-steps in bf16: torch's FSDP2 has one precision for both sums",
            "use fp32, or set parallel.engine: deepspeed",
        )
    if cfg.parallel.shard_size is not None and cfg.parallel.zero_stage == 0:
        why = "zero_stage 0, where every rank has all weights"
        yield no_effect("parallel.shard_size", cfg.parallel.shard_size, why)


def _offload(cfg: RunConfig) -> Iterator[Finding]:
    """Find settings that do not go with state in the host's memory."""
    parallel, optimizer, offload = cfg.parallel, cfg.optimizer, cfg.parallel.offload
    if offload == "none":
        return
    stage = parallel.zero_stage
    if offload == "all" and stage < 3:
        why, fix = f"at zero_stage {stage} weights stay on the GPU between passes", "use zero_stage 3, or optimizer"
        yield About("offload_at_zero_stage", "parallel.offload", offload).error(why, f"{fix} with zero_stage 1")
    elif offload == "optimizer" and stage == 3:
        why, fix = "at zero_stage 3 the shards of weights are the master weights", "use all, or zero_stage 1 or 2"
        yield About("offload_at_zero_stage", "parallel.offload", offload).error(why, fix)
    elif stage == 0:
        why = "at zero_stage 0 every rank would keep the whole state in host memory"
        yield About("offload_at_zero_stage", "parallel.offload", offload).error(why, "use zero_stage 1")
    slow = "saves memory of the host, where rounding is slow, and none of the GPU's"
    for key, value, proven, why in (
        ("optimizer.name", optimizer.name, "adamw", "multiplies matrices, for which a CPU is too slow"),
        ("optimizer.moments", optimizer.moments, "fp32", slow),
        ("optimizer.master", optimizer.master, "fp32", slow),
        ("parallel.pipeline_parallel_size", parallel.pipeline_parallel_size, 1,
         "leaves few weights to a rank, and was never tried with state in host memory"),
    ):  # fmt: skip
        if value != proven:
            yield About("not_offloaded", key, value).error(
                f"{why}: it does not go with parallel.offload {offload}", f"use {proven}, or offload: none"
            )
