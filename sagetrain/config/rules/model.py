"""Rules for the shape of the model, and for the shapes that attention backends take."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.layer_specs import WITH_SINKS
from sagetrain.config.rules.findings import About, divisors, hidden_sizes, no_effect
from sagetrain.config.run_parts import lengths_of
from sagetrain.config.schema import ModelConfig, RunConfig


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Check the arithmetic of heads and blocks, and the limits of each attention backend."""
    model, head_dim = cfg.model, cfg.model.head_dim
    again = cfg.training.activation_checkpointing
    if isinstance(again, int) and again > model.num_layers:
        yield About("recomputed_blocks", "training.activation_checkpointing", again).error(
            f"are more blocks than model.num_layers {model.num_layers}",
            f"use a number up to {model.num_layers}, or full",
        )
    if model.num_attention_heads % model.num_key_value_heads:
        yield About("grouped_query_heads", "model.num_key_value_heads", model.num_key_value_heads).error(
            f"does not divide num_attention_heads {model.num_attention_heads}: "
            "every key/value head serves equally many query heads",
            f"use one of {divisors(model.num_attention_heads)}",
        )
    if model.hidden_size % model.num_attention_heads and "head_dim" not in model.model_fields_set:
        yield About("default_head_dim", "model.hidden_size", model.hidden_size).error(
            f"is not a multiple of num_attention_heads {model.num_attention_heads}, and no head_dim is given",
            f"use {hidden_sizes(model)}, or give model.head_dim",
        )
    elif head_dim % 2:
        yield About("even_head_dim", "model.head_dim", head_dim).error(
            "is odd: the rotary embedding turns pairs",
            "use an even head_dim; by default it is hidden_size / num_attention_heads",
        )
    yield from rope_scaling(model)
    yield from _windows(cfg)
    if cfg.model.sinks and cfg.attention.backend not in WITH_SINKS:
        yield About("sinks_of_backend", "attention.backend", cfg.attention.backend).error(
            "has no sinks, which model.sinks asks for",
            f"use attention.backend {' or '.join(WITH_SINKS)}, or model.sinks false",
        )
    if cfg.training.perturb > model.hidden_size:
        yield About("perturb_channel", "training.perturb", cfg.training.perturb).error(
            f"names a channel, and model.hidden_size is {model.hidden_size}",
            f"use 1 to {model.hidden_size}, or 0 for none",
        )
    limits = {"sage": (16, 256), "flash": (8, 256)}.get(cfg.attention.backend)
    if limits and not limits[0] <= head_dim <= limits[1]:
        yield About("head_dim_of_backend", "model.head_dim", head_dim).error(
            f"attention.backend {cfg.attention.backend} takes {limits[0]} to {limits[1]}",
            "change the number of heads or head_dim, or use attention.backend sdpa",
        )
    if cfg.training.dtype == "fp32" and cfg.attention.backend == "flash":
        yield About("flash_needs_16_bits", "attention.backend", "flash").error(
            "flash-attn takes bf16 only, training.dtype is fp32", "use training.dtype bf16, or attention.backend sdpa"
        )
    if cfg.training.dtype == "fp32" and cfg.attention.backend == "sage":
        yield About("sage_in_fp32", "training.dtype", "fp32").info(
            "sage takes fp32 on a machine without a GPU only, where its torch twin runs; its kernels take bf16",
            "use training.dtype bf16, or attention.backend sdpa, on a GPU",
        )


def rope_scaling(model: ModelConfig) -> Iterator[Finding]:
    """Find bounds that are the wrong way round, and keys of the other type of scaling."""
    if (scaling := model.rope_scaling) is None:
        return
    bounds = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    slow, fast = bounds.get(scaling.type, ("factor", "factor"))
    if scaling.type != "linear" and getattr(scaling, slow) >= getattr(scaling, fast):
        yield About("rope_scaling_bounds", f"model.rope_scaling.{slow}", getattr(scaling, slow)).error(
            f"is not below {fast} {getattr(scaling, fast)}: no frequency would be between slow and fast",
            f"use a smaller {slow}, or leave both out",
        )
    for other, keys in {**bounds, "yarn": (*bounds["yarn"], "attention_factor", "truncate")}.items():
        for key in keys if other != scaling.type else ():
            # A configuration that a command wrote has all keys.
            if getattr(scaling, key) != type(scaling).model_fields[key].default:
                yield no_effect(f"model.rope_scaling.{key}", getattr(scaling, key), f"type {scaling.type}")


def _windows(cfg: RunConfig) -> Iterator[Finding]:
    """Find windows that no layer has, or that hide nothing."""
    if (windows := cfg.model.windows) is None:
        return
    if "W" not in windows.pattern[: cfg.model.num_layers]:
        first = f"the first {cfg.model.num_layers} letters, one a layer, have no W"
        yield no_effect("model.windows.pattern", windows.pattern, first)
        return
    stages = schedule.stages if (schedule := lengths_of(cfg)) else []
    longest = max(stage.seq_length or 0 for stage in stages) if stages else cfg.data.seq_length
    if windows.tokens >= longest:
        key = "the longest tokens_per_step.stages.seq_length" if stages else "data.seq_length"
        yield no_effect("model.windows.tokens", windows.tokens, f"{key} {longest}")
