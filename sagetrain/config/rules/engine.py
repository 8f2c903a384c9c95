"""What DeepSpeed is told: by SageTrain, and by the `deepspeed` section of the YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from sagetrain.config.arithmetic import resolved_zero_stage
from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import error, warning
from sagetrain.config.schema import RunConfig

# DeepSpeed keys that SageTrain writes itself -> the key that says it here.
_GENERATED = {
    "train_batch_size": "tokens_per_step",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "gradient_accumulation_steps": "tokens_per_step",
    "managed_gradient_accumulation": "tokens_per_step",
    "data_efficiency": "tokens_per_step",
    "curriculum_learning": "tokens_per_step",
    "dynamic_batching": "tokens_per_step",
    "optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "gradient_clipping": "optimizer.clip_grad",
    "scheduler": "lr_schedule",
    "bf16": "training.dtype",
    "fp16": "training.dtype",
    "amp": "training.dtype",
    "torch_autocast": "training.dtype",
    "data_types": "training.dtype",
    "communication_data_type": "parallel.gradient_reduction",
    "activation_checkpointing": "training.activation_checkpointing",
    "compile": "training.compile",
    "zero_optimization.stage": "parallel.zero_stage",
    "tensor_parallel": "parallel.tensor_parallel_size",
    "sequence_parallel_size": "parallel.context_parallel_size",
    "checkpoint": "checkpoint",
    "elasticity": "checkpoint",
    "tensorboard": "logging.tensorboard",
    "wandb": "logging.wandb",
    "steps_per_print": "logging.every_steps",
}
# Others that change how the optimizer state lies in memory, which our checkpoints read and write in place.
_UNSUPPORTED_ZERO = ("offload_optimizer", "offload_param", "cpu_offload", "zenflow", "mics_shard_size", "super_offload")
# Elements, which the memory estimate and the engine count with -> the least that DeepSpeed takes.
_ELEMENTS = {"reduce_bucket_size": 1, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
# What may be added. DeepSpeed itself says nothing about a top-level key that it does not know.
_EXTRA = (
    "aio",
    "comet",
    "comms_logger",
    "csv_monitor",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "timers",
    "wall_clock_breakdown",
    "zero_optimization",
)


def _reduction(cfg: RunConfig, zero: dict[str, Any]) -> Iterator[Finding]:
    """How gradients are summed over ranks (docs/gradients.md)."""
    if cfg.parallel.gradient_reduction == "bf16" and cfg.training.dtype != "bf16":
        yield error(
            "gradient_reduction_in_fp32",
            "parallel.gradient_reduction",
            "bf16",
            f"would round the gradients of a run in {cfg.training.dtype}",
            "use fp32, or training.dtype bf16",
        )
    key, overlap = "deepspeed.zero_optimization.overlap_comm", zero.get("overlap_comm", False)
    if overlap and resolved_zero_stage(cfg) < 2 and cfg.training.dtype != "bf16":
        yield error(
            "deepspeed_overlap",
            key,
            overlap,
            f"is for ZeRO 2 and 3, and for 1 in bf16: in {cfg.training.dtype} nothing is reduced during backward",
            "remove it, or use parallel.zero_stage 2 or 3",
        )
    elif overlap and resolved_zero_stage(cfg) == 2 and zero.get("use_multi_rank_bucket_allreduce") is False:
        yield warning(
            "deepspeed_overlap",
            key,
            overlap,
            "hides nothing with use_multi_rank_bucket_allreduce false: DeepSpeed waits for the GPU before each reduce",
            "use one of the two",
        )


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Keys of the `deepspeed` section that contradict ours, move what checkpoints read, or are misspelt."""
    if cfg.training.dtype == "bf16" and cfg.parallel.zero_stage == 0:
        yield Finding(
            "zero_0_in_bf16",
            "info",
            "parallel.zero_stage",
            0,
            "runs as stage 1: DeepSpeed's bf16 at stage 0 applies weight decay before training",
        )
    zero = cfg.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield error("deepspeed_type", "deepspeed.zero_optimization", zero, "must be a section", "write keys below it")
        zero = {}
    yield from _reduction(cfg, zero)
    given = {**cfg.deepspeed, **{f"zero_optimization.{key}": value for key, value in zero.items()}}
    for key, value in given.items():
        nested = key.removeprefix("zero_optimization.")
        if key in _GENERATED:
            yield error(
                "deepspeed_duplicate",
                f"deepspeed.{key}",
                value,
                "SageTrain writes this key itself; two places would contradict each other",
                f"remove it and set {_GENERATED[key]}",
            )
        elif nested != key and nested in _UNSUPPORTED_ZERO:
            yield error(
                "deepspeed_unsupported",
                f"deepspeed.{key}",
                value,
                "moves the optimizer state to where checkpoints do not find it",
                "remove it; raise parallel.zero_stage or tensor_parallel_size to save memory",
            )
        elif (
            nested != key
            and nested in _ELEMENTS
            and not (type(value) in (int, float) and value % 1 == 0 and value >= _ELEMENTS[nested])
        ):
            yield error(
                "deepspeed_type",
                f"deepspeed.{key}",
                value,
                f"must be a whole number of elements, {_ELEMENTS[nested]} or more",
                "write a number such as 2e8, or leave it out for the default",
            )
        elif nested == key and key not in _EXTRA:
            near = difflib.get_close_matches(key, [*_EXTRA, *_GENERATED], 1)
            yield warning(
                "deepspeed_unknown",
                f"deepspeed.{key}",
                value,
                "not among the keys that SageTrain knows; DeepSpeed ignores misspelt ones without a word",
                f"did you mean {near[0]}?" if near else "check it against DeepSpeed's documentation",
            )
