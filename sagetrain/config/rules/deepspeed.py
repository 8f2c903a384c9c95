"""Rules for the settings of DeepSpeed, which SageTrain and the `deepspeed` section of the YAML share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout, only_deepspeed, zero_optimization
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig

T = TypeVar("T")

# DeepSpeed keys that SageTrain writes itself, and the key of SageTrain to use instead.
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


def _all(names: str, value: T) -> dict[str, T]:
    """Return keys of zero_optimization, each with the value."""
    return dict.fromkeys((f"zero_optimization.{name}" for name in names.split()), value)


# DeepSpeed keys that are known to do harm or nothing: the harm, and what helps instead.
_OFFLOAD = "moves the optimizer state to where checkpoints do not find it"
_SAVE_MEMORY = "remove it; use parallel.offload with parallel.engine fsdp, or raise parallel.zero_stage"
_QUANTIZED = "rounds what the losses of a run depend on, and no run of ours has tried how much"
_OTHERS_NUMBERS = "writes numbers that are in metrics.jsonl and TensorBoard already", "remove it; see logging"
_HARMFUL = {
    **_all("cpu_offload cpu_offload_param cpu_offload_use_pin_memory mics_hierarchical_params_gather mics_shard_size "
           "offload_optimizer offload_param super_offload zenflow", (_OFFLOAD, _SAVE_MEMORY)),
    **_all("zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights",
           (_QUANTIZED, "remove it; parallel.gradient_reduction bf16 halves what travels")),
    **_all("memory_efficient_linear stage3_allgather_sequential stage3_max_live_parameters stage3_max_reuse_distance "
           "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold "
           "stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size zero_hpz_partition_size",
           ("is for DeepSpeed's ZeRO 3", "remove it; ZeRO 3 is by parallel.engine fsdp")),
    "zero_optimization.round_robin_gradients": (
        "deals the optimizer state out in an order that would give weights each other's names in a checkpoint",
        "remove it",
    ),
    "gradient_allreduce_op": ("would take the sum of the ranks' gradients, not their mean", "remove it"),
    "flops_profiler": (
        "fails in compiled blocks, and does not see what our kernels compute",
        "remove it; `profile` traces steps, perf/mfu is logged, and `sagetrain plan` counts FLOPs",
    ),
    **dict.fromkeys(("csv_monitor", "comet"), _OTHERS_NUMBERS),
}  # fmt: skip


@dataclass(frozen=True)
class _Values:
    """The values that a key takes: the rule and the fix in words, and a function that says whether a value is
    allowed."""

    rule: str
    fix: str
    allow: Callable[[Any], bool]


_BOOL = _Values("must be true or false", "write true or false", lambda value: isinstance(value, bool))


def _elements(least: int, multiple: int = 1) -> _Values:
    return _Values(
        f"must be {'an even' if multiple == 2 else 'a whole'} number of elements, {least} or more",
        "write a number such as 2e8, or leave it out for the default",
        lambda value: type(value) in (int, float) and value % multiple == 0 and value >= least,
    )


_LEVELS = ["debug", "info", "warning", "error", "critical"]
PROVEN = {
    **_all(
        "allgather_partitions contiguous_gradients overlap_comm reduce_scatter use_multi_rank_bucket_allreduce", _BOOL
    ),
    "zero_optimization.allgather_bucket_size": _elements(2, multiple=2),  # DeepSpeed asserts this.
    "zero_optimization.reduce_bucket_size": _elements(1),
    **{f"comms_logger.{key}": _BOOL for key in ("enabled", "verbose", "prof_all", "debug")},
    "comms_logger.prof_ops": _Values(
        "must be a list of names of collectives",
        "write [all_reduce, broadcast], say",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "log_level": _Values(f"must be one of {', '.join(_LEVELS)}", "write one of them", _LEVELS.__contains__),
    **{f"timers.throughput.{key}": _BOOL for key in ("enabled", "synchronized")},
    **dict.fromkeys(("memory_breakdown", "wall_clock_breakdown"), _BOOL),
}
"""The keys of the `deepspeed` section that may be given, with the values that they take. Each of them was seen to leave
losses as they are and resumes exact, at ZeRO 1 and 2, in fp32 and bf16 (tests/engines/test_engine.py). Every other
key of DeepSpeed is refused until it has been tested in the same way."""
_SECTIONS = {key[: place.start()] for key in PROVEN for place in re.finditer(r"\.", key)}


def _reduction(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check how gradients are summed over ranks (docs/gradients.md)."""
    if cfg.parallel.gradient_reduction == "bf16" and cfg.training.dtype != "bf16":
        yield About("gradient_reduction_in_fp32", "parallel.gradient_reduction", "bf16").error(
            f"would round the gradients of a run in {cfg.training.dtype}", "use fp32, or training.dtype bf16"
        )
    key, zero = "deepspeed.zero_optimization.overlap_comm", zero_optimization(cfg)
    overlap = zero.get("overlap_comm", False)
    if overlap and layout.zero_stage < 2:
        yield About("deepspeed_overlap", key, overlap).error(
            "is for ZeRO 2: at 0 and 1 DeepSpeed reduces nothing during backward",
            "remove it and use parallel.engine fsdp, which does at ZeRO 0 and 1, or parallel.zero_stage 2",
        )
    elif overlap and zero.get("use_multi_rank_bucket_allreduce") is False:
        yield About("deepspeed_overlap", key, overlap).warning(
            "hides nothing with use_multi_rank_bucket_allreduce false: DeepSpeed waits for the GPU before each reduce",
            "use one of the two",
        )


def by_deepspeed(cfg: RunConfig) -> tuple[str, str]:
    """Say why a run is by DeepSpeed, and what makes it one by FSDP2, for a setting that DeepSpeed does not have."""
    if cfg.parallel.engine != "auto":
        return f"parallel.engine is {cfg.parallel.engine}", "set parallel.engine: fsdp"
    key = only_deepspeed(cfg)
    key = "the section deepspeed" if key == "deepspeed" else f"{key}"
    return f"parallel.engine auto is deepspeed with {key}, which only DeepSpeed has", f"leave {key} out"


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Find settings that another engine has, and keys of the `deepspeed` section that contradict SageTrain's keys, were
    never tested, or have a wrong value."""
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
    yield from _reduction(cfg, layout)
    yield from _keys("", cfg.deepspeed)


def _names(above: str) -> list[str]:
    """Return the names that the section of this path has a place for."""
    paths = [*PROVEN, *_SECTIONS, *_GENERATED]
    return [name for path in paths if path.startswith(above) and "." not in (name := path.removeprefix(above))]


def _keys(above: str, section: Mapping[str, Any]) -> Iterator[Finding]:
    """Find the keys of a section that may not be given, or not with this value. `above` is the path of the section,
    with a dot at its end."""
    for name, value in section.items():
        path = f"{above}{name}"
        key = f"deepspeed.{path}"
        if path in _GENERATED:
            yield About("deepspeed_duplicate", key, value).error(
                "SageTrain writes this key itself; two places would contradict each other",
                f"remove it and set {_GENERATED[path]}",
            )
        elif path in _HARMFUL:
            yield About("deepspeed_unsupported", key, value).error(*_HARMFUL[path])
        elif path in _SECTIONS:
            if isinstance(value, dict):
                yield from _keys(f"{path}.", value)
            else:
                yield About("deepspeed_type", key, value).error("must be a section", "write keys below it")
        elif path in PROVEN:
            if not PROVEN[path].allow(value):
                yield About("deepspeed_type", key, value).error(PROVEN[path].rule, PROVEN[path].fix)
        else:
            near = difflib.get_close_matches(path.removeprefix(above), _names(above), 1)
            yield About("deepspeed_unknown", key, value).error(
                "is none of DeepSpeed's keys that were tried with SageTrain; some spoil checkpoints without a word",
                f"did you mean {near[0]}?" if near else "remove it (docs/gradients.md has those that may be given)",
            )
