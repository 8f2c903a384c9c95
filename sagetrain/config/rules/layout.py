"""Rules for the layout of a model over ranks. Every rank has to get an equal share."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from sagetrain.config.arithmetic import VOCAB_MULTIPLE, padded_vocab_size
from sagetrain.config.errors import Finding, many
from sagetrain.config.layer_specs import layers
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, divisors, neighbours, no_effect, samples_off
from sagetrain.config.schema import RunConfig


def launch(cfg: RunConfig, world_size: int) -> Iterator[Finding]:
    """Check that as many ranks were started as the configuration says."""
    wanted = cfg.parallel.world_size
    if wanted not in (None, world_size):
        yield About("ranks_of_launch", "parallel.world_size", wanted).error(
            f"this launch has {many(world_size, 'rank')}",
            "look for a hostfile that is not there or lacks hosts (deepspeed goes on without it), or for a smaller "
            f"allocation; set it to {world_size} if so many are meant, or to null for any number",
        )


def findings(cfg: RunConfig, layout: Layout, vocab_size: int | None) -> Iterator[Finding]:
    """Check the sizes that the tensor- and context-parallel sizes have to divide, and what sharded weights exclude.
    `vocab_size` is that of the tokenizer, when it is known."""
    if not layout.whole_between_passes and cfg.evaluation.samples_every_tokens is not None:
        yield About("samples_at_zero_3", "evaluation.samples_every_tokens", cfg.evaluation.samples_every_tokens).error(
            "text takes a pass over all weights for every token, and parallel.zero_stage 3 would gather them each time",
            f"set parallel.zero_stage: 2, or {samples_off(cfg.evaluation)} and take `sagetrain generate`",
        )
    yield from _ranks(cfg, layout)
    yield from _slices(cfg)
    yield from _vocabulary(cfg, vocab_size)
    tensor = cfg.parallel.tensor_parallel_size
    if cfg.parallel.sequence_parallel and tensor == 1:
        yield no_effect("parallel.sequence_parallel", True, "tensor_parallel_size 1")
    if cfg.parallel.tensor_parallel_overlap == "on" and tensor == 1:
        yield no_effect("parallel.tensor_parallel_overlap", "on", "tensor_parallel_size 1")


def whole_sequences(cfg: RunConfig) -> Iterator[Finding]:
    """Check that ranks have whole sequences, for a loss by sequence."""
    if (context := cfg.parallel.context_parallel_size) > 1:
        yield About("loss_by_sequence", "parallel.context_parallel_size", context).error(
            "gives every rank a slice of each sequence, and this loss sees whole sequences (sagetrain.by_sequence)",
            "set it to 1 (with parallel.tensor_parallel_size for long sequences), or take a loss of tokens",
        )


def _ranks(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that the sizes of all axes divide the ranks."""
    tensor, context, pipeline = layout.tensor, layout.context, layout.stages
    world_size, replicas, both = layout.world_size, layout.replicas, _tensor_and_context(cfg)
    stages = f" x pipeline_parallel_size {pipeline}" if pipeline > 1 else ""
    if world_size % tensor:
        yield About("world_size", "parallel.tensor_parallel_size", tensor).error(
            f"does not divide the {many(world_size, 'rank')} of this launch",
            f"use {divisors(gcd(world_size, *_shared(cfg)))}, or start a multiple of {tensor} ranks "
            f"(torchrun --nproc-per-node {tensor} -m sagetrain train; for plan --world-size)",
        )
    elif world_size % (tensor * context):
        yield About("world_size", "parallel.context_parallel_size", context).error(
            f"times tensor_parallel_size {tensor} does not divide the {many(world_size, 'rank')} of this launch",
            f"use {_context_sizes(cfg, world_size // tensor)}, or start a multiple of {tensor * context} ranks",
        )
    elif world_size % (tensor * context * pipeline):
        yield About("world_size", "parallel.pipeline_parallel_size", pipeline).error(
            f"times {both} does not divide the {many(world_size, 'rank')} of this launch",
            f"use {divisors(world_size // (tensor * context))}, or start a multiple of {tensor * context * pipeline} "
            "ranks",
        )
    elif replicas % (size := cfg.parallel.shard_size or 1):
        yield About("shard_size", "parallel.shard_size", size).error(
            f"does not divide the {many(replicas, 'replica')} of this launch ({many(world_size, 'rank')} over "
            f"tensor_parallel_size {tensor}{stages}): every replica is in one group that shards the model",
            f"use {divisors(replicas)}, or null: all of them shard",
        )


def _slices(cfg: RunConfig) -> Iterator[Finding]:
    """Check that every rank gets an equal share of heads, of columns and of each sequence."""
    tensor, context = cfg.parallel.tensor_parallel_size, cfg.parallel.context_parallel_size
    both = _tensor_and_context(cfg)
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        value = getattr(cfg.model, name)
        if value % tensor:
            yield About("tensor_parallel_split", f"model.{name}", value).error(
                f"is not a multiple of parallel.tensor_parallel_size {tensor}: every rank holds an equal share",
                f"use {neighbours(value, tensor)}, or another tensor_parallel_size",
            )
    yield from _heads_of_context(cfg, tensor, context)
    length, slices = cfg.data.seq_length, context * (tensor if cfg.parallel.sequence_parallel else 1)
    gathers = layers(cfg.model)[0].attention.gather_of(tensor, context) > 1
    if length % slices and not gathers:  # Ranks that gather keys have a rule of their own.
        rule, over = "context_parallel_split", f"parallel.context_parallel_size {context}"
        if length % context == 0:
            rule, over = "sequence_parallel_split", f"{both}, over which sequence_parallel spreads it"
        yield About(rule, "data.seq_length", length).error(
            f"is not a multiple of {over}: every rank holds an equal slice",
            f"use {neighbours(length, slices)}, or change the parallel section",
        )


def _heads_of_context(cfg: RunConfig, tensor: int, context: int) -> Iterator[Finding]:
    """Check that every context-parallel rank gets an equal share of the query heads, and of the key/value heads or of
    their copies."""
    heads, key_heads = _heads(cfg)
    if heads % tensor or key_heads % tensor or layers(cfg.model)[0].attention.gather_of(tensor, context) > 1:
        return
    both, ranks, sizes = _tensor_and_context(cfg), tensor * context, _context_sizes(cfg)
    key_heads_fit = key_heads % ranks == 0 or ranks % key_heads == 0
    if heads % ranks:
        given, also = cfg.model.model_fields_set, ""
        # Key/value heads that are not given are as many as query heads.
        grouped = "num_key_value_heads" in given
        multiple = lcm(ranks, key_heads) if grouped and key_heads_fit else ranks
        if grouped and not key_heads_fit:
            also = " with as many num_key_value_heads"
        if "head_dim" not in given and cfg.model.hidden_size % multiple:
            also += f"{' and' if also else ' with'} head_dim {cfg.model.head_dim}"
        yield About("context_parallel_split", "model.num_attention_heads", heads).error(
            f"is not a multiple of {both}: in attention every rank works on an equal share of the heads",
            f"use {neighbours(heads, multiple)}{also}, or a context_parallel_size of {sizes}",
        )
    elif not key_heads_fit:
        fitting = (n for n in range(tensor, heads + 1, tensor) if heads % n == 0 and not (n % ranks and ranks % n))
        yield About("context_parallel_split", "model.num_key_value_heads", key_heads).error(
            f"is neither a multiple of {both} nor divides it: in attention every rank works on an equal share of the "
            "key/value heads, or as many ranks on each of them",
            f"use one of {', '.join(map(str, fitting))}, or a context_parallel_size of {sizes}",
        )


def _vocabulary(cfg: RunConfig, vocab_size: int | None) -> Iterator[Finding]:
    """Check that the vocabulary has every token, and is cut into equal slices."""
    tensor, known = cfg.parallel.tensor_parallel_size, cfg.model.vocab_size
    if vocab_size and known and known < vocab_size:
        yield About("vocab_size", "model.vocab_size", known).error(
            f"is less than the {vocab_size} tokens of the tokenizer", f"use {vocab_size} or more, or leave it out"
        )
    vocab_size = known or vocab_size
    if vocab_size and padded_vocab_size(vocab_size) % tensor:
        yield About("tensor_parallel_vocab", "parallel.tensor_parallel_size", tensor).error(
            f"does not divide the padded vocabulary {padded_vocab_size(vocab_size)}",
            f"use a divisor of {VOCAB_MULTIPLE}, which always does",
        )


def _tensor_and_context(cfg: RunConfig) -> str:
    context = cfg.parallel.context_parallel_size
    words = f"parallel.tensor_parallel_size {cfg.parallel.tensor_parallel_size}"
    return words + (f" x context_parallel_size {context}" if context > 1 else "")


def _shared(cfg: RunConfig) -> tuple[int, ...]:
    """Return the sizes that tensor parallelism divides."""
    return *_heads(cfg), cfg.model.ffn_hidden_size, VOCAB_MULTIPLE


def _context_sizes(cfg: RunConfig, ranks: int = 0) -> str:
    """Return the context-parallel sizes that heads allow, as text. With a number of ranks, those that divide it."""
    sizes = layers(cfg.model)[0].attention.context_sizes(cfg.parallel.tensor_parallel_size)
    return ", ".join(str(size) for size in sizes if ranks % size == 0)


def _heads(cfg: RunConfig) -> tuple[int, int]:
    """Return the numbers of heads that tensor and context parallelism divide."""
    return cfg.model.num_attention_heads, cfg.model.num_key_value_heads
