"""RunConfig x world size -> findings: every combination that cannot run, before any process group starts.

Also the one place of the batch arithmetic: tokens per step = micro_batch_size x seq_length x data-parallel ranks x
accumulation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.schema import LrScheduleConfig, RampTokens, RunConfig, StagedTokens

VOCAB_MULTIPLE = 128

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
    "communication_data_type": "training.dtype",
    "activation_checkpointing": "training.activation_checkpointing",
    "compile": "training.compile",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.overlap_comm": "parallel.zero_stage",
    "tensor_parallel": "parallel.tensor_parallel_size",
    "sequence_parallel_size": "parallel.context_parallel_size",
    "checkpoint": "checkpoint",
    "elasticity": "checkpoint",
    "tensorboard": "logging.tensorboard",
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
    "wandb",
    "zero_optimization",
)


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 128, for matmuls and tensor parallelism."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def data_parallel_size(cfg: RunConfig, world_size: int) -> int:
    """Ranks, or groups of tensor- and context-parallel ranks, that work on sequences of their own."""
    return world_size // (cfg.parallel.tensor_parallel_size * cfg.parallel.context_parallel_size)


def token_multiple(cfg: RunConfig, data_parallel_size: int) -> int:
    """Tokens of one micro-step over all ranks. Tokens per step are a whole number of them: the accumulation."""
    return cfg.data.micro_batch_size * cfg.data.seq_length * data_parallel_size


def resolved_zero_stage(cfg: RunConfig) -> int:
    """ZeRO stage that really runs: bf16 at stage 0 runs as stage 1."""
    return 1 if cfg.training.dtype == "bf16" and cfg.parallel.zero_stage == 0 else cfg.parallel.zero_stage


def decay_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Tokens of the final decay of wsd: as configured, else a tenth of the run."""
    return lr_schedule.decay_tokens or max(1, total_tokens // 10)


def fit(cfg: RunConfig, world_size: int, vocab_size: int | None = None) -> list[Finding]:
    """What cannot run on `world_size` ranks (errors), and settings without effect (warnings).

    vocab_size: of the tokenizer, when it is known.
    """
    return [
        *_model(cfg),
        *_layout(cfg, world_size, vocab_size),
        *_tokens_per_step(cfg, world_size),
        *_lr_schedule(cfg),
        *_precision(cfg),
        *_deepspeed(cfg),
        *_without_effect(cfg),
    ]


def _error(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    return Finding(rule, "error", key, value, message, fix)


def _warning(rule: str, key: str, value: object, message: str, fix: str) -> Finding:
    return Finding(rule, "warning", key, value, message, fix)


def _model(cfg: RunConfig) -> Iterator[Finding]:
    model, head_dim = cfg.model, cfg.model.head_dim
    if model.num_attention_heads % model.num_key_value_heads:
        yield _error(
            "grouped_query_heads",
            "model.num_key_value_heads",
            model.num_key_value_heads,
            f"does not divide num_attention_heads {model.num_attention_heads}: "
            "every key/value head serves equally many query heads",
            f"use one of {_divisors(model.num_attention_heads)}",
        )
    rest = model.hidden_size % model.num_attention_heads
    if rest and "head_dim" not in model.model_fields_set:
        lower = model.hidden_size - rest
        yield _error(
            "default_head_dim",
            "model.hidden_size",
            model.hidden_size,
            f"is not a multiple of num_attention_heads {model.num_attention_heads}, and no head_dim is given",
            f"use {lower} or {lower + model.num_attention_heads}, or give model.head_dim",
        )
    elif head_dim % 2:
        yield _error(
            "even_head_dim",
            "model.head_dim",
            head_dim,
            "is odd: the rotary embedding turns pairs",
            "use an even head_dim; by default it is hidden_size / num_attention_heads",
        )
    limits = {"sage": (16, 256), "flash": (8, 256)}.get(cfg.attention.backend)
    if limits and not limits[0] <= head_dim <= limits[1]:
        yield _error(
            "head_dim_of_backend",
            "model.head_dim",
            head_dim,
            f"attention.backend {cfg.attention.backend} takes {limits[0]} to {limits[1]}",
            "change the number of heads or head_dim, or use attention.backend sdpa",
        )


def _layout(cfg: RunConfig, world_size: int, vocab_size: int | None) -> Iterator[Finding]:
    tensor, context = cfg.parallel.tensor_parallel_size, cfg.parallel.context_parallel_size
    both = f"parallel.tensor_parallel_size {tensor}" + (f" x context_parallel_size {context}" if context > 1 else "")
    if world_size % tensor:
        yield _error(
            "world_size",
            "parallel.tensor_parallel_size",
            tensor,
            f"does not divide the {world_size} ranks of this launch",
            f"use one of {_divisors(world_size)}, or start a multiple of {tensor} ranks",
        )
    elif world_size % (tensor * context):
        yield _error(
            "world_size",
            "parallel.context_parallel_size",
            context,
            f"times tensor_parallel_size {tensor} does not divide the {world_size} ranks of this launch",
            f"use one of {_divisors(world_size // tensor)}, or start a multiple of {tensor * context} ranks",
        )
    for name, by_context in (("num_attention_heads", True), ("num_key_value_heads", True), ("ffn_hidden_size", False)):
        value = getattr(cfg.model, name)
        if value % tensor:
            yield _error(
                "tensor_parallel_split",
                f"model.{name}",
                value,
                f"is not a multiple of parallel.tensor_parallel_size {tensor}: every rank holds an equal share",
                f"use {_neighbours(value, tensor)}, or another tensor_parallel_size",
            )
        elif by_context and value % (tensor * context):
            sizes = _divisors(value // tensor)
            yield _error(
                "context_parallel_split",
                f"model.{name}",
                value,
                f"is not a multiple of {both}: in attention every rank works on an equal share of the heads",
                f"use {_neighbours(value, tensor * context)}, or a context_parallel_size of {sizes}",
            )
    length, slices = cfg.data.seq_length, context * (tensor if cfg.parallel.sequence_parallel else 1)
    if length % slices:
        rule, over = "context_parallel_split", f"parallel.context_parallel_size {context}"
        if length % context == 0:
            rule, over = "sequence_parallel_split", f"{both}, over which sequence_parallel spreads it"
        yield _error(
            rule,
            "data.seq_length",
            length,
            f"is not a multiple of {over}: every rank holds an equal slice",
            f"use {_neighbours(length, slices)}, or change the parallel section",
        )
    known = cfg.model.vocab_size
    if vocab_size and known and known < vocab_size:
        yield _error(
            "vocab_size",
            "model.vocab_size",
            known,
            f"is less than the {vocab_size} tokens of the tokenizer",
            f"use {vocab_size} or more, or leave it out",
        )
    vocab_size = known or vocab_size
    if vocab_size and padded_vocab_size(vocab_size) % tensor:
        yield _error(
            "tensor_parallel_vocab",
            "parallel.tensor_parallel_size",
            tensor,
            f"does not divide the padded vocabulary {padded_vocab_size(vocab_size)}",
            f"use a divisor of {VOCAB_MULTIPLE}, which always does",
        )


def _tokens_per_step(cfg: RunConfig, world_size: int) -> Iterator[Finding]:
    schedule, total = cfg.tokens_per_step, cfg.training.total_tokens
    if world_size % (cfg.parallel.tensor_parallel_size * cfg.parallel.context_parallel_size) == 0:
        ranks = data_parallel_size(cfg, world_size)
        multiple = token_multiple(cfg, ranks)
        for key, tokens in schedule.named_tokens.items():
            if tokens % multiple:
                yield _error(
                    "whole_micro_steps",
                    key,
                    tokens,
                    f"is not a multiple of micro_batch_size {cfg.data.micro_batch_size} x seq_length "
                    f"{cfg.data.seq_length} x {ranks} data-parallel ranks = {multiple}",
                    f"use {_neighbours(tokens, multiple)}, or another micro_batch_size",
                )
    if isinstance(schedule, StagedTokens):
        starts = [stage.from_tokens for stage in schedule.stages]
        if starts[0] != 0:
            yield _error(
                "first_stage",
                "tokens_per_step.stages.0.from_tokens",
                starts[0],
                "the first stage must begin at 0",
                "set it to 0",
            )
        for i in range(1, len(starts)):
            if starts[i] <= starts[i - 1]:
                yield _error(
                    "stages_in_order",
                    f"tokens_per_step.stages.{i}.from_tokens",
                    starts[i],
                    f"is not after the stage before it, which begins at {starts[i - 1]}",
                    "list the stages in increasing order of from_tokens",
                )
            elif starts[i] >= total:
                yield _warning(
                    "stage_never_reached",
                    f"tokens_per_step.stages.{i}.from_tokens",
                    starts[i],
                    f"the run ends before, at training.total_tokens {total}",
                    "begin the stage earlier, drop it, or train longer",
                )
    if isinstance(schedule, RampTokens) and schedule.ramp_tokens > total:
        yield _warning(
            "ramp_never_ends",
            "tokens_per_step.ramp_tokens",
            schedule.ramp_tokens,
            f"the run ends before, at training.total_tokens {total}: {schedule.end} tokens per step are never reached",
            "shorten the ramp or train longer",
        )
    first = next(iter(schedule.named_tokens.values()))
    if total < first:
        yield _error(
            "total_tokens",
            "training.total_tokens",
            total,
            f"is less than the first optimizer step of {first} tokens",
            "train longer, or begin with fewer tokens per step",
        )


def _lr_schedule(cfg: RunConfig) -> Iterator[Finding]:
    schedule, total = cfg.lr_schedule, cfg.training.total_tokens
    decay = decay_tokens(schedule, total)
    if schedule.warmup_tokens >= total:
        yield _error(
            "warmup_before_end",
            "lr_schedule.warmup_tokens",
            schedule.warmup_tokens,
            f"is not less than training.total_tokens {total}: the peak would never be reached",
            "shorten the warm-up or train longer",
        )
    elif schedule.shape == "wsd" and schedule.warmup_tokens + decay > total:
        it = "it" if schedule.decay_tokens else f"the default of {decay}"
        yield _error(
            "decay_after_warmup",
            "lr_schedule.decay_tokens",
            schedule.decay_tokens,
            f"with a warm-up of {schedule.warmup_tokens} {it} is more than training.total_tokens {total}",
            f"use at most {total - schedule.warmup_tokens}, or shorten the warm-up",
        )
    if schedule.min_lr > cfg.optimizer.lr:
        yield _error(
            "min_lr",
            "lr_schedule.min_lr",
            schedule.min_lr,
            f"is above the peak, optimizer.lr {cfg.optimizer.lr}",
            "use a smaller min_lr",
        )


def _precision(cfg: RunConfig) -> Iterator[Finding]:
    if cfg.training.dtype == "fp32" and cfg.attention.backend == "flash":
        yield _error(
            "flash_needs_16_bits",
            "attention.backend",
            "flash",
            "flash-attn takes bf16 only, training.dtype is fp32",
            "use training.dtype bf16, or attention.backend sdpa",
        )
    if cfg.training.dtype == "fp32" and cfg.attention.backend == "sage":
        yield Finding(
            "sage_in_fp32",
            "info",
            "training.dtype",
            "fp32",
            "sage takes fp32 on a machine without a GPU only, where its torch twin runs; its kernels take bf16",
            "use training.dtype bf16, or attention.backend sdpa, on a GPU",
        )
    if cfg.training.dtype == "bf16" and cfg.parallel.zero_stage == 0:
        yield Finding(
            "zero_0_in_bf16",
            "info",
            "parallel.zero_stage",
            0,
            "runs as stage 1: DeepSpeed's bf16 at stage 0 applies weight decay before training",
        )


def _deepspeed(cfg: RunConfig) -> Iterator[Finding]:
    zero = cfg.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield _error("deepspeed_type", "deepspeed.zero_optimization", zero, "must be a section", "write keys below it")
        zero = {}
    given = {**cfg.deepspeed, **{f"zero_optimization.{key}": value for key, value in zero.items()}}
    for key, value in given.items():
        nested = key.removeprefix("zero_optimization.")
        if key in _GENERATED:
            yield _error(
                "deepspeed_duplicate",
                f"deepspeed.{key}",
                value,
                "SageTrain writes this key itself; two places would contradict each other",
                f"remove it and set {_GENERATED[key]}",
            )
        elif nested != key and nested in _UNSUPPORTED_ZERO:
            yield _error(
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
            yield _error(
                "deepspeed_type",
                f"deepspeed.{key}",
                value,
                f"must be a whole number of elements, {_ELEMENTS[nested]} or more",
                "write a number such as 2e8, or leave it out for the default",
            )
        elif nested == key and key not in _EXTRA:
            near = difflib.get_close_matches(key, [*_EXTRA, *_GENERATED], 1)
            yield _warning(
                "deepspeed_unknown",
                f"deepspeed.{key}",
                value,
                "not among the keys that SageTrain knows; DeepSpeed ignores misspelt ones without a word",
                f"did you mean {near[0]}?" if near else "check it against DeepSpeed's documentation",
            )


def _without_effect(cfg: RunConfig) -> Iterator[Finding]:
    """Settings that do nothing in this combination."""
    schedule = cfg.lr_schedule
    if schedule.decay_tokens is not None and schedule.shape != "wsd":
        yield _no_effect("lr_schedule.decay_tokens", schedule.decay_tokens, f"shape {schedule.shape}; only wsd uses it")
    if schedule.min_lr and schedule.shape == "constant":
        yield _no_effect("lr_schedule.min_lr", schedule.min_lr, "shape constant, which does not decay")
    if schedule.reference_tokens_per_step is not None and schedule.batch_rule == "none":
        yield _no_effect("lr_schedule.reference_tokens_per_step", schedule.reference_tokens_per_step, "batch_rule none")
    if cfg.parallel.sequence_parallel and cfg.parallel.tensor_parallel_size == 1:
        yield _no_effect("parallel.sequence_parallel", True, "tensor_parallel_size 1")
    if cfg.parallel.tensor_parallel_overlap == "on" and cfg.parallel.tensor_parallel_size == 1:
        yield _no_effect("parallel.tensor_parallel_overlap", "on", "tensor_parallel_size 1")
    if cfg.evaluation.every_tokens is not None and not cfg.data.valid:
        yield _no_effect("evaluation.every_tokens", cfg.evaluation.every_tokens, "no data.valid to evaluate on")
    if cfg.attention.smooth_q and cfg.attention.backend not in ("sage", "auto"):
        yield _no_effect("attention.smooth_q", True, f"backend {cfg.attention.backend}, which does not quantize")
    shared = sorted({source.path for source in cfg.data.train} & {source.path for source in cfg.data.valid})
    if shared:
        yield _warning(
            "held_out_data",
            "data.valid",
            shared[0],
            "is also a training source: its loss will look better than on unseen text",
            "evaluate on data that is not trained on",
        )


def _no_effect(key: str, value: object, why: str) -> Finding:
    return _warning("no_effect", key, value, f"has no effect with {why}", "remove it, or change what it goes with")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _neighbours(value: int, multiple: int) -> str:
    """The nearest allowed values, for a fix: `512 or 768`."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
