"""Rules for stages of the tokens-per-step schedule that have a sequence length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About, neighbours, not_proven
from sagetrain.config.run_parts import lengths_of, parts, sequences_of
from sagetrain.config.schema import RunConfig, Stage, StagedTokens
from sagetrain.config.tokens_per_step import stages

WITH_LENGTHS: dict[str, tuple[object, ...]] = {
    "parallel.engine": ("fsdp", "auto"),
    "parallel.gradient_reduction": ("fp32",),
    "deepspeed": ({},),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.offload": ("none",),
    "model.experts": (None,),
    "training.activation_offload": (False,),
    "evaluation.tasks": ([],),
    "evaluation.samples_every_tokens": (None,),
    "checkpoint.in_memory_every": (None,),
    "stability.spikes.policy": ("stop", "skip"),
    "stability.quant_noise.every_steps": (None,),
    "stability.replay.every_steps": (None,),
}
"""The values that were proven with stages of different sequence lengths, of each key that asks for it. Other values are
errors. A proof opens a value here, or removes the line if all values have one."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Check that stages say their sequences whole, that parts begin with whole sequences, and what goes with them."""
    if (schedule := lengths_of(cfg)) is None:
        yield from _without(cfg.tokens_per_step.stages if isinstance(cfg.tokens_per_step, StagedTokens) else [])
        return
    missing = False
    for i, stage in enumerate(schedule.stages):
        for name in ("seq_length", "micro_batch_size"):
            if getattr(stage, name) is None:
                missing = True
                yield About("sequences_of_stages", f"tokens_per_step.stages.{i}.{name}", "null").error(
                    "is missing, and another stage has a seq_length: either all stages have both, or none",
                    f"give it, such as the run's data.{name} {getattr(cfg.data, name)}",
                )
    yield from not_proven(
        cfg, WITH_LENGTHS, "sequences_not_by_stage", "seq_length in tokens_per_step.stages",
        "a run for each length (training.init_from), without seq_length in the stages",
    )  # fmt: skip
    if missing:
        return
    own = cfg.data.seq_length, cfg.data.micro_batch_size, cfg.model.rope_scaling
    if own not in map(sequences_of, schedule.stages):
        first = schedule.stages[0]
        yield About("sequences_of_run", "data.seq_length", cfg.data.seq_length).error(
            f"with data.micro_batch_size {cfg.data.micro_batch_size} and model.rope_scaling "
            f"{_spelled(cfg.model.rope_scaling)} is not what any of tokens_per_step.stages has, which have lengths of "
            "their own",
            f"use those of the first stage: {first.seq_length}, {first.micro_batch_size}, "
            f"{_spelled(first.rope_scaling)}",
        )
        return
    yield from _borders(cfg, schedule)


def _without(every: Sequence[Stage]) -> Iterator[Finding]:
    for i, stage in enumerate(every):
        for name in ("micro_batch_size", "rope_scaling"):
            if (value := getattr(stage, name)) is not None:
                key = f"tokens_per_step.stages.{i}.{name}"
                yield About("sequences_of_stages", key, _spelled(value)).error(
                    "is that of a stage whose sequences have a length of their own, and no stage has a seq_length",
                    "give every stage seq_length and micro_batch_size, or remove it",
                )


def _borders(cfg: RunConfig, schedule: StagedTokens) -> Iterator[Finding]:
    starts = [stage.from_tokens for stage in schedule.stages]
    if starts[0] != 0 or any(after <= before for before, after in pairwise(starts)):
        return  # Other rules say so.
    rows, every = stages(schedule, cfg.training.total_tokens, 1), parts(cfg)
    if every[1:] and not cfg.data.missing:
        key = f"tokens_per_step.stages.{_first_stage(every[1])}.seq_length"
        yield About("text_again", key, every[1].data.seq_length).info(
            "reads the files of data.train in an order of its own: some of the text was read in earlier stages",
        )
    for before, part in pairwise(every):
        place, length = _first_stage(part), part.data.seq_length
        key = f"tokens_per_step.stages.{place}"
        begin = next((row.from_tokens for row in rows if row.from_tokens >= starts[place]), None)
        if begin is not None and begin % length:
            yield About("whole_sequences_at_border", f"{key}.from_tokens", starts[place]).error(
                f"the steps before end at {begin} tokens, which is no multiple of the stage's seq_length {length}, in "
                "whose sequences the run is counted from there on",
                f"use {neighbours(begin, length)}, and tokens per step before it that reach it",
            )
        if length > before.data.seq_length and part.model.rope_scaling == before.model.rope_scaling:
            yield About("new_positions", f"{key}.seq_length", length).warning(
                f"is longer than the {before.data.seq_length} of the stage before, with the same RoPE, which rotates "
                "later positions by angles that the weights have never met: the loss is higher there at first",
                "give the stage a rope_scaling, or train for many tokens",
            )


def _first_stage(part: RunConfig) -> int:
    """Return the place of the first stage of a part."""
    assert isinstance(part.tokens_per_step, StagedTokens)
    return part.tokens_per_step.own[0]


def _spelled(value: object) -> str:
    return "null" if value is None else str(value)
