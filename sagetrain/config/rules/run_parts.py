"""Rules for stages of the tokens-per-step schedule that have a sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About, neighbours, not_proven, spelled
from sagetrain.config.run_parts import first_stage, lengths_of, parts, sequences_of
from sagetrain.config.schema import RunConfig, StagedTokens
from sagetrain.config.tokens_per_step import stages

WITH_LENGTHS: dict[str, tuple[object, ...]] = {
    "parallel.engine": ("fsdp", "auto"),
    "parallel.gradient_reduction": ("fp32",),
    "parallel.offload": ("none",),
    "model.experts": (None,),
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
    schedule, wrong = lengths_of(cfg), False
    for i, stage in enumerate(cfg.tokens_per_step.stages if isinstance(cfg.tokens_per_step, StagedTokens) else ()):
        for name, value in zip(("seq_length", "micro_batch_size", "rope_scaling"), sequences_of(stage), strict=True):
            about = About("sequences_of_stages", f"tokens_per_step.stages.{i}.{name}", value)
            if schedule is None and value is not None:
                yield about.error("has no seq_length beside it", "give every stage seq_length and micro_batch_size")
            elif schedule and value is None and name != "rope_scaling":
                why = "is missing, and another stage has a seq_length: either all stages have both, or none"
                yield about.error(why, f"give it, such as the run's data.{name} {getattr(cfg.data, name)}")
                wrong = True
    if schedule is None:
        return
    yield from not_proven(
        cfg, WITH_LENGTHS, "sequences_not_by_stage", "seq_length in tokens_per_step.stages",
        "a run for each length (training.init_from), without seq_length in the stages",
    )  # fmt: skip
    own = cfg.data.seq_length, cfg.data.micro_batch_size, cfg.model.rope_scaling
    if wrong:
        return
    if own not in map(sequences_of, schedule.stages):
        first = schedule.stages[0]
        yield About("sequences_of_run", "data.seq_length", cfg.data.seq_length).error(
            f"with data.micro_batch_size {cfg.data.micro_batch_size} and model.rope_scaling "
            f"{spelled(cfg.model.rope_scaling)} is not what any of tokens_per_step.stages has, which have lengths of "
            "their own",
            f"use those of the first stage: {first.seq_length}, {first.micro_batch_size}, "
            f"{spelled(first.rope_scaling)}",
        )
        return
    yield from _borders(cfg, schedule)


def _borders(cfg: RunConfig, schedule: StagedTokens) -> Iterator[Finding]:
    starts = [stage.from_tokens for stage in schedule.stages]
    if starts[0] != 0 or any(after <= before for before, after in pairwise(starts)):
        return  # Other rules say so.
    rows, every = stages(schedule, cfg.training.total_tokens, 1), parts(cfg)
    if every[1:] and not cfg.data.missing:
        key = f"tokens_per_step.stages.{first_stage(every[1])}.seq_length"
        yield About("text_again", key, every[1].data.seq_length).info(
            "reads the files of data.train in an order of its own: some of the text was read in earlier stages",
        )
    for number, part in enumerate(every[1:], 1):
        place, length = first_stage(part), part.data.seq_length
        key = f"tokens_per_step.stages.{place}"
        begin = next((row.from_tokens for row in rows if row.from_tokens >= starts[place]), None)
        if begin is not None and begin % length:
            yield About("whole_sequences_at_border", f"{key}.from_tokens", starts[place]).error(
                f"the steps before end at {begin} tokens, which is no multiple of the stage's seq_length {length}, in "
                "whose sequences the run is counted from there on",
                f"use {neighbours(begin, length)}, and tokens per step before it that reach it",
            )
        scaling = part.model.rope_scaling
        earlier = (each for each in every[:number] if each.model.rope_scaling == scaling)
        met = max((each.data.seq_length for each in earlier), default=0)
        if length > met and (met or scaling is None):
            than = f"the {met} of the stages before" if met else "what the stages before have"
            yield About("new_positions", f"{key}.seq_length", length).warning(
                f"is longer than {than} with the same RoPE, which rotates later positions by angles that the weights "
                "have never met: the loss is higher there at first",
                "give the stage a rope_scaling, or train for many tokens",
            )
