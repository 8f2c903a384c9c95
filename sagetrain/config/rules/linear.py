"""Rules for linear layers in 8 bits: the sizes that their kernels take."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.arithmetic import VOCAB_MULTIPLE, low_bit_part, may_be_low_bit
from sagetrain.config.errors import Finding
from sagetrain.config.layer_specs import linear_layers
from sagetrain.config.linear_sizes import AUTO_PRECISION, LOW_BIT_MULTIPLE
from sagetrain.config.rules.findings import About, hidden_sizes, neighbours, no_effect
from sagetrain.config.schema import RunConfig
from sagetrain.config.tokens_per_step import MOST_SIZES, may_begin, sizes_of

_COSTS = {
    "fp8": "fp8 with INT8 attention ended 0.007 ± 0.006 nats per token (0.27 %) above 16 bits on held-out "
    "text: 43M parameters, 262,144 tokens per step, six seeds; 0.003 ± 0.002 where runs share their first half",
    "int8": "int8 ended 0.0003 ± 0.0002 nats per token above 16 bits on held-out text: 43M parameters, "
    "524,288 tokens per step, four pairs of runs that share their first half; from the first token on, with INT8 "
    "attention, 0.003 ± 0.004 at 131,072, twelve pairs",
}


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find layers that cannot be multiplied in 8 bits, and settings that leave no layer in 8 bits."""
    linear, model, tensor = cfg.linear, cfg.model, cfg.parallel.tensor_parallel_size
    kept = {name: getattr(linear, name) for name in ("keep_first_blocks", "keep_last_blocks")}
    below = linear.keep_layers_below
    yield from _head(cfg)
    if not may_be_low_bit(cfg):
        why = f"linear.precision {linear.precision} and training.dtype {cfg.training.dtype}: no layer is in 8 bits"
        for name, value in linear.model_dump(exclude={"precision", "head"}, exclude_defaults=True).items():
            yield no_effect(f"linear.{name}", value, why)
        return
    asked = linear.precision
    if asked == "auto":  # `auto` takes this precision where it gains.
        linear = linear.model_copy(update={"precision": AUTO_PRECISION})
    if asked != "auto":
        yield About(f"linear_{asked}_costs_loss", "linear.precision", asked).info(
            _COSTS[asked], "sagetrain compare shows what it is for your model", "our runs: results/linear-layers"
        )
    if not linear.low_bit_blocks(model.num_layers):
        name, blocks = max(kept.items(), key=lambda item: item[1])
        yield About("linear_blocks", f"linear.{name}", blocks).error(
            f"together keep {sum(kept.values())} of the {model.num_layers} blocks in 16 bits: "
            f"none is left for linear.precision {asked}",
            "keep fewer, or use linear.precision bf16",
        )
    parts = {name: getattr(linear, name) or 0.0 for name in ("keep_last_fraction", "keep_first_fraction")}
    if sum(parts.values()) >= 1:
        (other, less), (name, most) = sorted(parts.items(), key=lambda item: item[1])
        yield About("linear_parts", f"linear.{name}", most).error(
            f"leaves nothing of the run for linear.precision {asked}: "
            f"with linear.{other} {less} all of it is in 16 bits",
            "use smaller ones, or linear.precision bf16",
        )
    layers = linear_layers(model, tensor)
    largest = max(layer.weights for layer in layers.values())
    if largest < below:
        yield About("linear_blocks", "linear.keep_layers_below", below).error(
            f"is more than the {largest:,} weights that a rank has of the largest layer: "
            f"none is left for linear.precision {asked}",
            "use a smaller one, or linear.precision bf16",
        )
    sizes = {
        "hidden_size": (1, 1),
        "ffn_hidden_size": (1, tensor),
        "num_attention_heads": (model.head_dim, tensor),
        "num_key_value_heads": (model.head_dim, tensor),
    }
    for name, (width, ranks) in sizes.items():
        value = getattr(model, name)
        size, rest = divmod(value * width, ranks)
        odd = [layer for layer, each in layers.items() if size in each.odd and each.weights >= below]
        if rest or not odd:  # Sizes that the ranks do not divide are a finding of layout.py.
            continue
        made_of = (f" x head_dim {width}" if width > 1 else "") + (
            f" / tensor_parallel_size {ranks}" if ranks > 1 else ""
        )
        change = f"use {neighbours(value, LOW_BIT_MULTIPLE * ranks)}" if width == 1 else "change head_dim"
        change = f"use {hidden_sizes(model)}" if name == "hidden_size" else change
        smaller = ", a smaller tensor_parallel_size" if ranks > 1 else ""
        needs = f"keeps {' and '.join(odd)} in 16 bits for that" if asked == "auto" else "needs that"
        yield About("linear_multiple", f"model.{name}", value).found(
            "info" if asked == "auto" else "error",
            f"makes matrices with a side of {size} ({value}{made_of}), which is not a multiple of {LOW_BIT_MULTIPLE}: "
            f"linear.precision {asked} {needs}",
            f"{change}{smaller}, or linear.precision bf16",
        )
    if cfg.training.dtype == "fp32":
        yield About("low_bit_linear_in_fp32", "training.dtype", "fp32").info(
            f"linear.precision {linear.precision} takes fp32 without a GPU only, where its torch twin runs",
            "use training.dtype bf16, or linear.precision bf16, on a GPU",
        )


def _head(cfg: RunConfig) -> Iterator[Finding]:
    """Find what was not proven with an output projection in 8 bits."""
    linear, ranks = cfg.linear, cfg.parallel.tensor_parallel_size
    if linear.head == "bf16":
        return
    yield About("linear_head_costs_loss", "linear.head", linear.head).info(
        "what the output projection in 8 bits costs in loss was not measured yet",
        "sagetrain compare shows what it is for your model",
        "its speed and errors: results/log/step.md",
    )
    head = About("linear_head", "linear.head", linear.head)
    multiple, width = LOW_BIT_MULTIPLE, cfg.model.hidden_size
    for wrong, why, fix in (
        (not linear.low_bit, f"needs the layers of the blocks in 8 bits, not linear.precision {linear.precision}",
         "use linear.precision int8 or fp8, or "),
        (cfg.model.experts is not None, "was not proven with model.experts yet", "use "),
        (width % multiple, f"needs a model.hidden_size that is a multiple of {multiple}, not {width}",
         f"use model.hidden_size {hidden_sizes(cfg.model)}, or "),
        # A rank's rows of the padded vocabulary are then a multiple, whatever the vocabulary is.
        (VOCAB_MULTIPLE % (multiple * ranks), "needs a parallel.tensor_parallel_size that divides "
         f"{VOCAB_MULTIPLE // multiple}, not {ranks}, for a rank's share of the rows", "use such a size, or "),
    ):  # fmt: skip
        if wrong:
            yield head.error(why, f"{fix}linear.head bf16")


def unreached(cfg: RunConfig) -> Iterator[Finding]:
    """Find parts of the run in which no step begins. This is a check of its own because it does not depend on the
    layout and has to walk over the whole schedule."""
    linear, total = cfg.linear, cfg.training.total_tokens
    if not may_be_low_bit(cfg) or sizes_of(cfg.tokens_per_step) > MOST_SIZES:
        return
    begin, end = low_bit_part(linear, total)
    steps, schedule = "these tokens_per_step: the last step begins before", cfg.tokens_per_step
    if begin and not may_begin(schedule, begin, total):
        why = f"linear.keep_first_fraction {linear.keep_first_fraction} and {steps} that part ends, at "
        yield no_effect("linear.precision", linear.precision, f"{why}{begin:,} of {total:,} tokens")
    elif linear.keep_last_fraction and not may_begin(schedule, int(end), total):
        why = f"{steps} that part does, at {int(end):,} of {total:,} tokens"
        yield no_effect("linear.keep_last_fraction", linear.keep_last_fraction, why)
