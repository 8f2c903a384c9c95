"""Rules for ranks that gather keys: context parallelism past the query heads. What was not tried with it is refused."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, neighbours
from sagetrain.config.schema import RunConfig

_TILE = 64
"""INT8 attention has scales of this many tokens, which no two ranks may share."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Find what does not go with context-parallel ranks that gather keys."""
    if layout.gather == 1:
        return
    heads = cfg.model.num_attention_heads // layout.tensor
    gathers = (
        f"parallel.context_parallel_size {layout.context} is more than the {heads} query heads of a rank, "
        f"so that keys are gathered over {layout.gather} ranks"
    )
    fewer = f"or use a context_parallel_size of at most {heads}"
    length, multiple = cfg.data.seq_length, 2 * _TILE * layout.gather
    if length % multiple:
        yield About("gather_of_tokens", "data.seq_length", length).error(
            f"is not a multiple of {multiple}: {gathers}, and each has two chunks of whole tiles of {_TILE} tokens",
            f"use {neighbours(length, multiple)}, {fewer}",
        )
    for key, value, why, fix in _not_tried(cfg, layout):
        yield About("gather_of_keys", key, value).error(f"{why}: {gathers}", f"{fix}, {fewer}")


def _not_tried(cfg: RunConfig, layout: Layout) -> Iterator[tuple[str, object, str, str]]:
    """Yield key and value of what was not tried, with a reason and a fix."""
    attention, stability = cfg.attention, cfg.stability
    if layout.engine == "deepspeed":
        yield "parallel.engine", cfg.parallel.engine, "DeepSpeed was never tried with gathered keys", "use fsdp"
    if cfg.model.experts is not None:
        why = "a mixture of experts was never tried with gathered keys"
        yield "model.experts.number", cfg.model.experts.number, why, "use a model without experts"
    if cfg.parallel.offload != "none":
        why = "state in host memory was never tried with gathered keys"
        yield "parallel.offload", cfg.parallel.offload, why, "use none"
    if attention.backend == "auto":
        yield "attention.backend", "auto", "it times whole sequences, not chunks of them", "use sage, flash or sdpa"
    if attention.backend == "sage" and attention.recipe == "auto":
        yield "attention.recipe", "auto", "it times whole sequences, not chunks of them", "use scores or fine"
    if attention.backend == "sage" and stability.monitor.every_steps is not None:
        why = "the monitor samples attention of whole sequences"
        yield "stability.monitor.every_steps", stability.monitor.every_steps, why, "use null"
    if stability.quant_noise.every_steps:
        why = "the noise of quantization was never measured with gathered keys"
        yield "stability.quant_noise.every_steps", stability.quant_noise.every_steps, why, "use null"
