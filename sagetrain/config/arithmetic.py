"""The arithmetic that everything else agrees on, in one place: ranks, tokens of a micro-step, padded vocabulary.

tokens per step = micro_batch_size x seq_length x data-parallel ranks x accumulation.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from sagetrain.config.schema import LinearConfig, LrScheduleConfig, Recomputation, RunConfig

VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int) -> int:
    """Return the number of rows of the embedding: the vocabulary rounded up to a multiple of 128, for fast matmuls and
    tensor parallelism."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def data_parallel_size(cfg: RunConfig, world_size: int) -> int:
    """Return the number of model replicas with sequences of their own. Each of them is a group of tensor-, context- and
    pipeline-parallel ranks."""
    return replicas(cfg, world_size) // cfg.parallel.context_parallel_size


def replicas(cfg: RunConfig, world_size: int) -> int:
    """Return the number of ranks that hold the same part of the model before ZeRO: data- and context-parallel ranks."""
    return world_size // (cfg.parallel.tensor_parallel_size * cfg.parallel.pipeline_parallel_size)


def idle_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage waits while the pipeline fills and drains."""
    idle = (stages - 1) / (chunks * micro_batches)
    return idle / (1 + idle)


def token_multiple(cfg: RunConfig, data_parallel_size: int) -> int:
    """Return the tokens of one micro-step over all ranks. Tokens per step are a whole number of micro-steps: the
    gradient accumulation."""
    return cfg.data.micro_batch_size * cfg.data.seq_length * data_parallel_size


def only_deepspeed(cfg: RunConfig) -> str | None:
    """Return the key that asks for what DeepSpeed has and FSDP2 has not, or None."""
    if cfg.deepspeed:
        return "deepspeed"
    return "parallel.gradient_reduction" if cfg.parallel.gradient_reduction == "bf16" else None


def engine_of(cfg: RunConfig) -> Literal["deepspeed", "fsdp"]:
    """Return the engine that runs. `auto` is torch's FSDP2, except where a key asks for what only DeepSpeed has. A run
    that continues keeps the engine that it had (auto/kept.py)."""
    if cfg.parallel.engine != "auto":
        return cfg.parallel.engine
    return "deepspeed" if only_deepspeed(cfg) else "fsdp"


def resolved_zero_stage(cfg: RunConfig) -> int:
    """Return the ZeRO stage that really runs: under DeepSpeed bf16 at stage 0 runs as stage 1."""
    changes_weights = engine_of(cfg) == "deepspeed" and cfg.training.dtype == "bf16"
    return 1 if changes_weights and cfg.parallel.zero_stage == 0 else cfg.parallel.zero_stage


def shards_weights(cfg: RunConfig) -> bool:
    """Whether a rank may hold only a part of its weights between passes: at ZeRO 3, except in groups of one rank."""
    alone = engine_of(cfg) == "fsdp" and cfg.parallel.shard_size == 1
    return cfg.parallel.zero_stage == 3 and not alone


def takes_probes(cfg: RunConfig) -> bool:
    """Whether micro-batches may be run apart from a step. The hooks of DeepSpeed's ZeRO 3 do not support that."""
    return engine_of(cfg) == "fsdp" or cfg.parallel.zero_stage < 3


def rests_hooks(cfg: RunConfig) -> bool:
    """Return whether FSDP2's hooks run in no micro-step of a step but the last one. At ZeRO 0 and 1 the engine keeps
    whole weights, and gradients are summed on each rank. Micro-batches of a pipeline are under way at once, so there
    all passes go through the hooks."""
    return engine_of(cfg) == "fsdp" and cfg.parallel.zero_stage < 2 and cfg.parallel.pipeline_parallel_size == 1


def needs_no_hooks(cfg: RunConfig, replicas: int) -> bool:
    """Return whether FSDP2's hooks run in no micro-step at all. A single replica has nothing to reduce, unless its
    gradients go to the host's memory."""
    return rests_hooks(cfg) and replicas == 1 and cfg.parallel.offload == "none"


class Refusal(NamedTuple):
    """The reason why a setting does not go with another one, and what to do."""

    key: str
    value: object
    why: str
    fix: str


def not_recorded(cfg: RunConfig) -> Refusal | None:
    """Return what keeps micro-steps from being CUDA graphs (training.cuda_graphs); None: nothing does."""
    parallel, stage = cfg.parallel, cfg.parallel.zero_stage
    if engine_of(cfg) == "deepspeed":
        return Refusal("parallel.engine", "deepspeed", "hooks of DeepSpeed run in every micro-step", "use fsdp")
    if stage > 1:
        return Refusal("parallel.zero_stage", stage, "hooks of FSDP2 run in every micro-step", "use 0 or 1")
    if parallel.offload != "none":
        return Refusal("parallel.offload", parallel.offload, "gradients leave the GPU", "use none")
    for name, why in (
        ("pipeline_parallel_size", "micro-batches are under way at once"),
        ("tensor_parallel_size", "the collectives of a micro-step count on from each other"),
        ("context_parallel_size", "the collectives of a micro-step were never recorded"),
    ):
        if (size := getattr(parallel, name)) > 1:
            return Refusal(f"parallel.{name}", size, why, "use 1")
    return None


def recorded(cfg: RunConfig) -> bool:
    """Return whether micro-steps become CUDA graphs on a GPU, if they fit into its memory."""
    return cfg.training.cuda_graphs != "off" and not_recorded(cfg) is None


def recomputed_blocks(how: Recomputation | Literal["auto"], num_layers: int) -> int:
    """Return how many blocks, from the first on, the backward pass recomputes as wholes
    (training.activation_checkpointing)."""
    return how if isinstance(how, int) else num_layers * (how == "full")


def sharding_ranks(cfg: RunConfig, replicas: int) -> int:
    """Return the number of neighbouring replicas that shard weights and optimizer state between them. Other replicas
    have copies of the shards."""
    return 1 if resolved_zero_stage(cfg) == 0 else cfg.parallel.shard_size or replicas


def overlaps_reduction(cfg: RunConfig) -> bool:
    """Return deepspeed.zero_optimization.overlap_comm: whether DeepSpeed reduces gradients beside the backward pass.
    The default is true at ZeRO 3 (docs/gradients.md)."""
    return bool(cfg.deepspeed.get("zero_optimization", {}).get("overlap_comm", resolved_zero_stage(cfg) == 3))


def sharding_in_words(cfg: RunConfig, replicas: int) -> str:
    """Return the ZeRO stage and the engine as text: `ZeRO 1 by DeepSpeed`, `ZeRO 3 by FSDP2 over 8 of 64 replicas`."""
    stage, shards = f"ZeRO {resolved_zero_stage(cfg)}", sharding_ranks(cfg, replicas)
    if engine_of(cfg) == "deepspeed":
        return f"{stage} by DeepSpeed"
    return f"{stage} by FSDP2" + (f" over {shards} of {replicas} replicas" if 1 < shards < replicas else "")


def checkpoint_tokens(cfg: RunConfig) -> int:
    """Return the tokens between checkpoints: as configured, or else a tenth of the run."""
    return cfg.checkpoint.every_tokens or max(1, cfg.training.total_tokens // 10)


def decay_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Return the tokens of the final decay of a wsd schedule: as configured, or else a tenth of the run."""
    return lr_schedule.decay_tokens or max(1, total_tokens // 10)


def warmup_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Return the tokens of the warm-up: as configured, or else the configured share of the run."""
    return lr_schedule.warmup_tokens or round(lr_schedule.warmup * total_tokens)


def last_part(fraction: float, total_tokens: int) -> int:
    """Return the tokens seen at which the last `fraction` of the run begins."""
    return round(total_tokens * (1 - fraction))


def may_be_low_bit(cfg: RunConfig) -> bool:
    """Whether any linear layer may be in 8 bits. In fp32 `auto` has nothing to choose from."""
    return cfg.linear.low_bit or (cfg.linear.precision == "auto" and cfg.training.dtype == "bf16")


def low_bit_linear(linear: LinearConfig, tokens: int, total_tokens: int) -> bool:
    """Whether linear layers multiply in 8 bits in a step that begins when `tokens` have been seen."""
    begin, end = low_bit_part(linear, total_tokens)
    return linear.low_bit and begin <= tokens < end


def low_bit_part(linear: LinearConfig, total_tokens: int) -> tuple[int, float]:
    """Return the tokens seen at which linear layers begin and stop to multiply in 8 bits: 0 and infinity without
    bounds."""
    first, last = linear.keep_first_fraction, linear.keep_last_fraction
    # The first step belongs to any first part, however short the part is.
    begin = 0 if first is None else max(1, round(total_tokens * first))
    return begin, math.inf if last is None else last_part(last, total_tokens)


def parts_of(tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """Return the number of parts in which a rank's tokens go through the blocks: 2 if the ranks can shard each half,
    else 1."""
    return 2 if overlap and tensor_parallel_size > 1 and tokens % (2 * tensor_parallel_size) == 0 else 1


def attention_calls(num_sequences: int, tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """Return the number of parts in which the tokens go through attention: those of parts_of if they are whole
    sequences, else 1."""
    parts = parts_of(tokens, tensor_parallel_size, overlap)
    return parts if num_sequences % parts == 0 else 1
