"""Rules for the layout of a model over ranks. Every rank has to get an equal share."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from sagetrain.config.arithmetic import VOCAB_MULTIPLE, padded_vocab_size
from sagetrain.config.errors import Finding, many
from sagetrain.config.layer_specs import layers
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import LOW_BIT_MULTIPLE
from sagetrain.config.rules.findings import About, divisors, nearest, neighbours, no_effect, samples_off
from sagetrain.config.schema import ModelConfig, RunConfig
from sagetrain.config.sections.model import MOST_HEADS


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
    yield from _slices(cfg, layout)
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
            f"start a multiple of {tensor} ranks (torchrun --nproc-per-node {tensor} -m sagetrain train; for plan "
            f"--world-size){_tensor_sizes(cfg, layout)}",
        )
    elif world_size % (tensor * context):
        yield About("world_size", "parallel.context_parallel_size", context).error(
            f"times tensor_parallel_size {tensor} does not divide the {many(world_size, 'rank')} of this launch",
            f"start a multiple of {tensor * context} ranks{context_sizes(cfg, layout)}",
        )
    elif world_size % (tensor * context * pipeline):
        yield About("world_size", "parallel.pipeline_parallel_size", pipeline).error(
            f"times {both} does not divide the {many(world_size, 'rank')} of this launch",
            f"use {divisors(world_size // (tensor * context), cfg.model.num_layers)}, or start a multiple of "
            f"{tensor * context * pipeline} ranks",
        )
    elif replicas % (size := cfg.parallel.shard_size or 1):
        yield About("shard_size", "parallel.shard_size", size).error(
            f"does not divide the {many(replicas, 'replica')} of this launch ({many(world_size, 'rank')} over "
            f"tensor_parallel_size {tensor}{stages}): every replica is in one group that shards the model",
            f"use {divisors(replicas)}, or null: all of them shard",
        )


def _slices(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that every rank gets an equal share of heads, of columns and of each sequence."""
    tensor, context, gathers = layout.tensor, layout.context, layout.gather > 1
    if (columns := cfg.model.ffn_hidden_size) % tensor:
        yield About("tensor_parallel_split", "model.ffn_hidden_size", columns).error(
            f"is not a multiple of parallel.tensor_parallel_size {tensor}: every rank holds an equal share",
            f"use {neighbours(columns, tensor * (LOW_BIT_MULTIPLE if cfg.linear.low_bit else 1))}"
            f"{_tensor_sizes(cfg, layout)}",
        )
    # Ranks that gather have too few heads to share. Heads that tensor parallelism does not cut are no such case.
    apart = gathers and cfg.model.num_attention_heads % tensor == 0
    yield from _heads(cfg, layout, tensor if apart else tensor * context)
    length, slices = cfg.data.seq_length, context * (tensor if cfg.parallel.sequence_parallel else 1)
    if length % slices and not gathers:  # Ranks that gather keys have a rule of their own.
        rule, over = "context_parallel_split", f"parallel.context_parallel_size {context}"
        if length % context == 0:
            rule = "sequence_parallel_split"
            over = f"{_tensor_and_context(cfg)}, over which sequence_parallel spreads it"
        yield About(rule, "data.seq_length", length).error(
            f"is not a multiple of {over}: every rank holds an equal slice",
            f"use {neighbours(length, slices)}, or change the parallel section",
        )


def _heads(cfg: RunConfig, layout: Layout, ranks: int) -> Iterator[Finding]:
    """Check that each of `ranks` tensor- and context-parallel ranks gets an equal share of the query heads, and of the
    key/value heads or of their copies."""
    tensor, heads, key_heads = layout.tensor, cfg.model.num_attention_heads, cfg.model.num_key_value_heads
    rule, why = "context_parallel_split", "in attention every rank works on an equal share of the heads"
    over, sizes = _tensor_and_context(cfg), context_sizes(cfg, layout)
    if heads % tensor or key_heads % tensor:
        sizes = _tensor_sizes(cfg, layout)
    if (heads if heads % ranks else key_heads) % tensor:
        rule, why = "tensor_parallel_split", "every rank holds an equal share"
        over = f"parallel.tensor_parallel_size {tensor}"
    if heads % ranks:
        yield About(rule, "model.num_attention_heads", heads).error(
            f"is not a multiple of {over}: {why}", f"use {_heads_that_fit(cfg.model, tensor, ranks)}{sizes}"
        )
    elif key_heads % tensor or not _whole_keys(key_heads, ranks):
        fitting = ", ".join(map(str, _key_heads(heads, tensor, ranks)))
        is_not = "not a multiple of {}" if key_heads % tensor else "neither a multiple of {} nor divides it"
        why += ", or as many ranks on each of them" * (key_heads % tensor == 0)
        yield About(rule, "model.num_key_value_heads", key_heads).error(
            f"is {is_not.format(over)}: {why}", f"use {fitting}{sizes}"
        )


def _whole_keys(key_heads: int, ranks: int) -> bool:
    """Return whether key/value heads are shared evenly: each rank has equally many whole ones, or each of them has
    equally many ranks."""
    return key_heads % ranks == 0 or ranks % key_heads == 0


def _key_heads(heads: int, tensor: int, ranks: int) -> list[int]:
    """Return the numbers of key/value heads that go with so many query heads on so many ranks."""
    return [n for n in range(tensor, heads + 1, tensor) if heads % n == 0 and _whole_keys(n, ranks)]


def _heads_that_fit(model: ModelConfig, tensor: int, ranks: int) -> str:
    """Return the nearest numbers of query heads that so many ranks share, as text for a fix, each with the keys that
    change along."""
    key_heads, ways = model.num_key_value_heads, dict[str, list[str]]()
    # Key/value heads that are not given are as many as query heads.
    grouped, sized = ("num_key_value_heads" in model.model_fields_set), ("head_dim" in model.model_fields_set)
    fit = grouped and key_heads % tensor == 0 and _whole_keys(key_heads, ranks)
    multiple = lcm(ranks, key_heads) if fit else ranks
    for heads in (each for each in nearest(model.num_attention_heads, multiple) if each <= MOST_HEADS):
        width, rest = divmod(model.hidden_size, heads)
        also = []
        if grouped and key_heads not in (fitting := _key_heads(heads, tensor, ranks)):
            also.append(f"num_key_value_heads {min(fitting, key=lambda number: abs(number - key_heads))}")
        if not sized and (rest or width % 2 or not 16 <= width <= 256):
            also.append(f"head_dim {min(max(model.head_dim // 2 * 2, 16), 256)}")
        ways.setdefault(" with " * bool(also) + " and ".join(also), []).append(str(heads))
    fewer = "a smaller parallel.tensor_parallel_size or context_parallel_size"
    return ", or ".join(" or ".join(numbers) + also for also, numbers in ways.items()) or fewer


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


def _tensor_sizes(cfg: RunConfig, layout: Layout) -> str:
    """Return the tensor-parallel sizes that ranks, heads, columns and sequences allow, as the end of a fix; "" if
    none."""
    model, context, attention = cfg.model, layout.context, layers(cfg.model)[0].attention
    ranks, rest = divmod(layout.world_size, context * layout.stages)
    length = cfg.data.seq_length // context if cfg.parallel.sequence_parallel else 0
    heads = model.num_attention_heads, model.num_key_value_heads
    whole = gcd(0 if rest else ranks, length, *heads, model.ffn_hidden_size, VOCAB_MULTIPLE)
    sizes = [size for size in range(1, whole + 1) if not (rest or whole % size)]
    return _or_size("tensor", [n for n in sizes if context in attention.context_sizes(n) or context > heads[0] // n])


def context_sizes(cfg: RunConfig, layout: Layout) -> str:
    """Return the context-parallel sizes that ranks, heads and sequences allow, as the end of a fix; "" if none."""
    ranks, rest = divmod(layout.world_size, layout.tensor * layout.stages)
    length = cfg.data.seq_length / (layout.tensor if cfg.parallel.sequence_parallel else 1)
    rest = rest or cfg.model.num_attention_heads % layout.tensor or cfg.model.num_key_value_heads % layout.tensor
    sizes = [] if rest else layers(cfg.model)[0].attention.context_sizes(layout.tensor)
    return _or_size("context", [size for size in sizes if ranks % size == 0 and length % size == 0])


def _or_size(axis: str, sizes: list[int]) -> str:
    return f", or a {axis}_parallel_size of {', '.join(map(str, sizes))}" if sizes else ""
