"""Rules for pipeline parallelism: what fits into stages, and how much the stages idle."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.arithmetic import idle_share
from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, no_effect
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Find pipelines that the model does not have, and settings that a pipeline does not have."""
    parallel = cfg.parallel
    if parallel.pipeline_parallel_size == 1:
        for name, default in (("pipeline_chunks", 1), ("pipeline_blocks", "auto")):
            if getattr(parallel, name) != default:
                yield no_effect(f"parallel.{name}", getattr(parallel, name), "parallel.pipeline_parallel_size 1")
        return
    if parallel.zero_stage == 3:
        yield About("pipeline_at_zero_3", "parallel.zero_stage", 3).error(
            "would gather the weights of a pipeline stage again for every micro-batch",
            "use zero_stage 1 or 2: a stage has few weights already; or pipeline_parallel_size 1 with zero_stage 3",
        )
    yield from _blocks(cfg)
    yield from _idle(cfg, layout)


def _blocks(cfg: RunConfig) -> Iterator[Finding]:
    parallel, layers = cfg.parallel, cfg.model.num_layers
    stages, chunks = parallel.pipeline_parallel_size, parallel.pipeline_chunks
    many = f"parallel.pipeline_parallel_size {stages}" + (f" x pipeline_chunks {chunks}" if chunks > 1 else "")
    if parallel.pipeline_blocks == "auto":
        if layers < stages * chunks:
            key, value = ("pipeline_chunks", chunks) if layers >= stages else ("pipeline_parallel_size", stages)
            yield About("pipeline_split", f"parallel.{key}", value).error(
                f"leaves chunks without a block: {many} makes {stages * chunks} chunks of model.num_layers {layers}",
                f"use at most {layers // stages if key == 'pipeline_chunks' else layers}",
            )
        return
    blocks = parallel.pipeline_blocks
    if len(blocks) != stages * chunks:
        yield About("pipeline_split", "parallel.pipeline_blocks", blocks).error(
            f"has {len(blocks)} numbers, and {many} makes {stages * chunks} chunks: each number is the blocks of a "
            "chunk",
            f"give {stages * chunks} numbers, or auto",
        )
    elif sum(blocks) != layers:
        yield About("pipeline_split", "parallel.pipeline_blocks", blocks).error(
            f"adds up to {sum(blocks)} blocks, and model.num_layers is {layers}",
            f"give numbers that add up to {layers}, or auto",
        )


def _idle(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Warn of steps with fewer micro-batches than stages."""
    if not layout.even:
        return
    stages, multiple = layout.stages, layout.micro_step
    key, tokens = min(cfg.tokens_per_step.named_tokens.items(), key=lambda item: item[1])
    micro_batches = tokens // multiple
    if 0 < micro_batches < stages:
        idle = idle_share(stages, cfg.parallel.pipeline_chunks, micro_batches)
        yield About("pipeline_idle", key, tokens).warning(
            f"makes {micro_batches} micro-batch{'es' * (micro_batches > 1)} a step for {stages} pipeline stages, which "
            f"then idle {idle:.0%} of the time",
            f"use {stages * multiple:,} tokens or more, a smaller data.micro_batch_size, or fewer stages",
        )
