"""The parts of a run whose stages have sequences of different lengths, such as 4K tokens and then 32K.

Each part is a configuration of its own: the data, the rotary scaling and the schedule are those of its stages. Parts
follow one another in one run folder. A part ends with a checkpoint, and the next part continues from it, as a resumed
run does. So whatever depends on the sequence length is made anew: compiled blocks, CUDA graphs, choices of `auto`.

Every part reads the token files in an order of its own, as sequences of its length. It begins as far into its order as
the run has seen tokens. So a part reads no text twice before its files are read through, but it may read text that an
earlier part has read in shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from sagetrain.config.errors import Finding
from sagetrain.config.schema import RunConfig, Stage, StagedTokens

KEYS_OF_STAGES = {
    "data.seq_length": "seq_length",
    "data.micro_batch_size": "micro_batch_size",
    "model.rope_scaling": "rope_scaling",
}
"""The keys that a part of a run takes from its stages, and their names there."""


def lengths_of(cfg: RunConfig) -> StagedTokens | None:
    """Return the schedule, if its stages have sequence lengths."""
    schedule = cfg.tokens_per_step
    return schedule if isinstance(schedule, StagedTokens) and any(s.seq_length for s in schedule.stages) else None


def sequences_of(stage: Stage) -> tuple[object, ...]:
    """Return the settings of a stage that a part has in common: sequence length, micro-batch and rotary scaling."""
    return stage.seq_length, stage.micro_batch_size, stage.rope_scaling


def parts(cfg: RunConfig) -> list[RunConfig]:
    """Return the configuration of each part of a run, in order. A run whose stages have no lengths is one part, and so
    is a part."""
    schedule = lengths_of(cfg)
    if schedule is None or schedule.is_part or not all(s.seq_length and s.micro_batch_size for s in schedule.stages):
        return [cfg]
    made = []
    for _, group in groupby(schedule.own, lambda i: sequences_of(schedule.stages[i])):
        own = [*group]
        stage = schedule.stages[own[0]]
        data = {"seq_length": stage.seq_length, "micro_batch_size": stage.micro_batch_size}
        part = cfg.changed({"data": data, "model": {"rope_scaling": stage.rope_scaling}})
        own_schedule = schedule.part(range(own[0], own[-1] + 1))
        made.append(part.model_copy(update={"tokens_per_step": own_schedule}))
    return made


def run_of(part: RunConfig) -> RunConfig:
    """Return the configuration of the run that a part belongs to, with the sequences of that part."""
    schedule = lengths_of(part)
    return part if schedule is None else part.model_copy(update={"tokens_per_step": schedule.part(None)})


def part_at(cfg: RunConfig, tokens: int) -> int:
    """Return the number of the part that a step belongs to which begins at `tokens`."""
    return sum(begin_of(part) <= tokens for part in parts(cfg)[1:])


def first_stage(part: RunConfig) -> int:
    """Return the place of the first stage of a part."""
    return part.tokens_per_step.own[0] if isinstance(part.tokens_per_step, StagedTokens) else 0


def begin_of(part: RunConfig) -> int:
    """Return the tokens from which on steps belong to a part."""
    schedule = part.tokens_per_step
    return schedule.stages[first_stage(part)].from_tokens if isinstance(schedule, StagedTokens) else 0


def end_of(part: RunConfig) -> int:
    """Return the tokens seen at which no further step belongs to a part: the next part begins, or the run ends."""
    schedule, total = part.tokens_per_step, part.training.total_tokens
    if isinstance(schedule, StagedTokens) and schedule.own.stop < len(schedule.stages):
        return min(total, schedule.stages[schedule.own.stop].from_tokens)
    return total


def with_keys_of_stages(findings: Iterable[Finding], part: RunConfig) -> Iterator[Finding]:
    """Name the keys of the first stage of a part where findings name those of data and model, which a part takes from
    it."""
    schedule = lengths_of(part)
    for finding in findings:
        for key, name in KEYS_OF_STAGES.items():
            if schedule and schedule.is_part and (finding.key == key or finding.key.startswith(f"{key}.")):
                behind = finding.key.removeprefix(key)
                finding = replace(finding, key=f"tokens_per_step.stages.{first_stage(part)}.{name}{behind}")
        if schedule and schedule.is_part and finding.key.startswith("tokens_per_step.stages."):
            for key, name in KEYS_OF_STAGES.items():
                finding = replace(
                    finding, fix=finding.fix.replace(key, f"tokens_per_step.stages.{first_stage(part)}.{name}")
                )
        yield finding
