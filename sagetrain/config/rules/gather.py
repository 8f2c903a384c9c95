"""Rules for ranks that gather keys: context parallelism past the query heads. What was not tried with it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, neighbours
from sagetrain.config.rules.layout import context_sizes
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
    fewer = context_sizes(cfg, layout)
    slices = layout.context * (layout.tensor if cfg.parallel.sequence_parallel else 1)
    length, multiple = cfg.data.seq_length, lcm(2 * _TILE * layout.gather, slices)
    if length % multiple:
        yield About("gather_of_tokens", "data.seq_length", length).error(
            f"is not a multiple of {multiple}: {gathers}, and each has two chunks of whole tiles of {_TILE} tokens, of "
            "which every rank holds an equal slice",
            f"use {neighbours(length, multiple)}{fewer}",
        )
    attention, parallel = cfg.attention, cfg.parallel
    monitor, probe = cfg.stability.monitor.every_steps, cfg.stability.quant_noise.every_steps
    sage, whole = attention.backend == "sage", "it times whole sequences, not chunks of them"
    number, never = cfg.model.experts and cfg.model.experts.number, "was never tried with gathered keys"
    for untried, key, value, why, fix in (
        (layout.engine == "deepspeed", "parallel.engine", parallel.engine, f"DeepSpeed {never}", "use fsdp"),
        (number, "model.experts.number", number, f"a mixture of experts {never}", "use a model without experts"),
        (parallel.offload != "none", "parallel.offload", parallel.offload, f"state in host memory {never}", "use none"),
        (attention.backend == "auto", "attention.backend", "auto", whole, "use flash or sdpa"),
        (sage and attention.recipe == "auto", "attention.recipe", "auto", whole, "use scores or fine"),
        (sage and monitor is not None, "stability.monitor.every_steps", monitor,
         "the monitor samples attention of whole sequences", "use null"),
        (probe, "stability.quant_noise.every_steps", probe,
         "the noise of quantization was never measured with gathered keys", "use null"),
    ):  # fmt: skip
        if untried:
            yield About("gather_of_keys", key, value).error(f"{why}: {gathers}", f"{fix}{fewer}")
