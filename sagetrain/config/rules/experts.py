"""Rules for layers with a mixture of experts: their sizes, and what was proven to work with them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sagetrain.config.errors import Finding, many
from sagetrain.config.layer_specs import layers
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import EIGHT_BITS
from sagetrain.config.rules.findings import About, divisors, hidden_sizes, neighbours, not_proven
from sagetrain.config.schema import ExpertsConfig, RunConfig

_MULTIPLE = 16
"""The kernels read rows in pieces of this many values."""
_MOST = 1023
"""torch's grouped products take fewer than 1,024 groups."""

PROVEN: dict[str, tuple[object, ...]] = {
    "parallel.engine": ("auto", "fsdp"),
    "parallel.gradient_reduction": ("fp32",),
}
"""The values that were proven with experts, of each key that asks for it. Other values are errors. A proof opens a
value here, or removes the line if all values have one."""

WITH_BIASES: dict[str, tuple[object, ...]] = {"model.activation": ("swiglu",)}
"""The values that were proven with experts of model.conventions gpt_oss, which have an activation of their own."""

UNDER_TENSOR_PARALLELISM: dict[str, tuple[object, ...]] = {
    "parallel.sequence_parallel": (True,),
    "parallel.tensor_parallel_overlap": ("on", "off"),
}
"""The values that were proven with experts under tensor parallelism. A rank sends its own tokens to experts."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check the sizes of experts, and that everything else in the configuration was proven with them."""
    ranks = cfg.parallel.expert_parallel_size
    if (experts := cfg.model.experts) is None:
        if ranks > 1:
            yield About("no_experts", "parallel.expert_parallel_size", ranks).error(
                "ranks are to have experts between them, and a dense model has none (model.experts: null)",
                "remove it, or give model.experts",
            )
        return
    yield from _sizes(cfg, experts)
    yield from _ranks(experts, layout, ranks)
    yield from _texts(cfg, layout)
    yield from _router(experts)
    proven = PROVEN | (UNDER_TENSOR_PARALLELISM if layout.tensor > 1 else {})
    if cfg.linear.low_bit:  # `auto` keeps in 16 bits what 8 bits do not take.
        yield from _eight_bits(cfg, layout)
    rule, without = "not_proven_with_experts", "a dense model (model.experts: null)"
    yield from not_proven(cfg, proven, rule, "model.experts", without)
    if cfg.model.conventions == "gpt_oss":
        biased = "model.experts in model.conventions gpt_oss"
        yield from not_proven(cfg, WITH_BIASES, rule, biased, "other conventions (model.conventions: llama)")


def _sizes(cfg: RunConfig, experts: ExpertsConfig) -> Iterator[Finding]:
    """Check that the numbers go together, and that the kernels take the sizes."""
    key, number, tensor = "model.experts", experts.number, cfg.parallel.tensor_parallel_size
    if experts.per_token > number:
        why = f"is more than the {number} experts of a layer (model.experts.number)"
        yield About("experts_per_token", f"{key}.per_token", experts.per_token).error(why, f"use 1 to {number}")
    if number > _MOST:
        why = f"is more than {_MOST:,}, which grouped products take"
        yield About("experts_number", f"{key}.number", number).error(why, f"use up to {_MOST:,}")
    if experts.dense_layers >= cfg.model.num_layers:
        yield About("experts_in_no_layer", f"{key}.dense_layers", experts.dense_layers).error(
            f"leaves none of the {cfg.model.num_layers} layers with experts",
            f"use 0 to {cfg.model.num_layers - 1}, or model.experts: null",
        )
    for name, size, fitting in (
        ("model.hidden_size", cfg.model.hidden_size, hidden_sizes(cfg.model)),
        (f"{key}.ffn_size", experts.ffn_size, neighbours(experts.ffn_size, _MULTIPLE)),
    ):
        if size % _MULTIPLE:
            why = f"is not a multiple of {_MULTIPLE}, which the kernels of experts need"
            yield About("experts_multiple", name, size).error(why, f"use {fitting}")
    if experts.shared * experts.ffn_size % tensor:
        why = f"x ffn_size {experts.ffn_size} is not a multiple of parallel.tensor_parallel_size {tensor}"
        fix = f"use {neighbours(experts.shared, tensor // math.gcd(tensor, experts.ffn_size))}, or 0"
        yield About("tensor_parallel_split", f"{key}.shared", experts.shared).error(why, fix)


def _ranks(experts: ExpertsConfig, layout: Layout, ranks: int) -> Iterator[Finding]:
    """Check that the ranks that share experts have as many each, and that there are such groups of ranks."""
    key, of_stage = "parallel.expert_parallel_size", layout.world_size // layout.stages
    if experts.number % ranks or of_stage % ranks:
        ranks_of = many(of_stage, "rank") + " of a pipeline stage" * (layout.stages > 1)
        why = f"does not divide {experts.number} experts (model.experts.number) and {ranks_of}"
        yield About("expert_parallel_split", key, ranks).error(
            why, f"use {divisors(math.gcd(experts.number, of_stage))}"
        )


def _texts(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that texts are written by the ranks of one group, which draw the same tokens by its collectives."""
    tensor, ranks, asked = layout.tensor, layout.experts, cfg.evaluation
    if max(tensor, ranks) % min(tensor, ranks) and (asked.tasks or asked.samples_every_tokens):
        why = (
            f"cuts across tensor-parallel groups of {tensor} ranks: none of its groups has whole weights to write texts"
        )
        fix = f"use a divisor or a multiple of {tensor}, or no evaluation.tasks and evaluation.samples_every_tokens"
        yield About("texts_of_experts", "parallel.expert_parallel_size", ranks).error(why, fix)


def _eight_bits(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that a rank's matrices and its sums over tokens suit 8 bits, those of the layers without experts as well
    (linear.py looks at the last layer)."""
    precision = cfg.linear.precision
    sides = (
        (name, side)
        for layer in dict.fromkeys(layers(cfg.model))
        for name, sizes in layer.linear_layers(layout.tensor).items()
        for side in sizes.odd
        if sizes.weights >= cfg.linear.keep_layers_below
    )
    for name, side in sides:
        why = f"needs sides that are multiples of {_MULTIPLE}, and a rank's {name} has one of {side}"
        fix = "use other sizes, a smaller parallel.tensor_parallel_size, or linear.precision bf16"
        yield About("experts_multiple_in_8_bits", "linear.precision", precision).error(why, fix)
        break
    ranks = layout.context * layout.tensor
    tokens = cfg.data.micro_batch_size * cfg.data.seq_length * cfg.parallel.expert_parallel_size // ranks
    most = EIGHT_BITS[precision].most_terms
    if most and tokens > most:
        why = f"gives experts {tokens:,} tokens at a time: {precision.upper()} adds up {most:,} at most"
        fix = "use fewer, or linear.precision fp8"
        yield About("experts_tokens_in_int8", "data.micro_batch_size", cfg.data.micro_batch_size).error(why, fix)


def _router(experts: ExpertsConfig) -> Iterator[Finding]:
    """Find a router that learns nothing, and one that nothing balances."""
    if experts.per_token == 1 and experts.renormalize:
        why = "makes the weight of a token's only expert 1 whatever its score is: the loss teaches the router nothing"
        yield About("router_learns_nothing", "model.experts.renormalize", True).warning(
            why, "use false, or more per_token"
        )
    if not experts.balance.bias_rate and not experts.balance.aux_weight:
        why = "with bias_rate 0 lets a router send most tokens to a few experts"
        fix = "use 0.01, or bias_rate 0.001"
        yield About("router_not_balanced", "model.experts.balance.aux_weight", 0.0).warning(why, fix)
