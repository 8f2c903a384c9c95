"""Make the plan of a run before it starts; show.py prints it. It needs no torch and no GPU. Of the data it reads the
lengths of documents, if the data is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.config.arguments import spelled
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.check import check, placed
from sagetrain.config.earlier_run import MeasuredRun
from sagetrain.config.errors import ConfigError, Finding, many
from sagetrain.config.load import load_config
from sagetrain.config.rules import run_parts
from sagetrain.config.run_parts import begin_of, end_of, lengths_of, parts, with_keys_of_stages
from sagetrain.config.schema import DataConfig, RunConfig
from sagetrain.config.tokens_per_step import ScheduleStage, stages
from sagetrain.costs.accounting import with_recomputation
from sagetrain.costs.hardware import Hardware
from sagetrain.data.remote_blocks import fetch_sources
from sagetrain.data.tokenizer import known_tokenizer
from sagetrain.planning.findings import of_plan, on_gpu, out_of_room, precision_of_gpu, with_way_out
from sagetrain.planning.layouts import fewest_gpus, host_memory_to_offload, propose, propose_smaller_states
from sagetrain.planning.priced import PricedLayout, Target, calibrate
from sagetrain.planning.result import Plan
from sagetrain.training import inputs

ASSUMED_VOCAB_SIZE = 32_768
# Without these rules the numbers would mean nothing.
_NO_MODEL = {"grouped_query_heads", "linear_precision_of_gpu"}
_SPLITS = {
    "tensor_parallel_split",
    "tensor_parallel_vocab",
    "context_parallel_split",
    "gather_of_tokens",
    "pipeline_split",
}
_NO_LAYOUT = {*_NO_MODEL, *_SPLITS, "world_size"}
_NO_SCHEDULE = {
    "first_stage",
    "noise_aware_bounds",
    "noise_aware_multiple",
    "ramp_multiple",
    "ramp_too_fine",
    "stages_in_order",
    "warmup_before_end",
    "whole_micro_steps",
}
# document_span takes the mean of at most this many sources.
_SPAN_SOURCES = 64


def make_plan(
    config: RunConfig | str | Path,
    overrides: Sequence[str],
    world_size: int | None,
    hardware: Hardware,
    measured_tokens_per_second: float | None = None,
    measured: MeasuredRun | None = None,
) -> Plan:
    """Make the plan of a run. Raises ConfigError if the file cannot be loaded, or no GPU could reach the measured
    speed.

    Args:
        config: the configuration, or its file.
        world_size: number of ranks. None: that of the configuration, or 1.
        measured_tokens_per_second: measured speed of this configuration without data parallelism; the prediction is
            scaled to it.
        measured: an earlier run, for the findings about its measurements.
    """
    path = None if isinstance(config, RunConfig) else config
    cfg = config if isinstance(config, RunConfig) else load_config(config, overrides)
    fetch_sources(cfg.data)
    how = path, overrides, world_size, hardware, measured_tokens_per_second, measured
    first, *later = (_of_part(part, *how) for part in parts(cfg))
    if not later:
        return first
    every: list[Finding] = []
    for findings in (placed(run_parts.findings(cfg), path, overrides), *(plan.findings for plan in (first, *later))):
        every += [finding for finding in findings if finding not in every]
    return replace(first, findings=placed(every, None, ()), later=tuple(later))


def _of_part(
    cfg: RunConfig,
    path: str | Path | None,
    overrides: Sequence[str],
    world_size: int | None,
    hardware: Hardware,
    measured_tokens_per_second: float | None,
    measured: MeasuredRun | None,
) -> Plan:
    """Make the plan of a part of a run (config/run_parts.py), with the arguments of make_plan."""
    asked, kept = inputs.as_continued(cfg)
    ranks = world_size or asked.parallel.world_size or 1
    tokenizer = known_tokenizer(asked.data)
    known = tokenizer.vocab_size if tokenizer else None
    vocab = padded_vocab_size(asked.model.vocab_size or known or ASSUMED_VOCAB_SIZE)
    span = document_span(asked.data)
    others = *inputs.findings(asked, tokenizer), *filter(None, (kept, precision_of_gpu(asked, hardware)))
    findings = on_gpu(check(asked, ranks, vocab_size=known, files=False, measured=measured, others=others), hardware)
    refused = {finding.rule for finding in findings if finding.level == "error"}
    possible = not refused & _NO_LAYOUT
    target = Target(ranks, vocab, hardware, span)
    configured = _settled(asked, target, possible)
    if measured_tokens_per_second and possible:
        target = replace(target, hardware=calibrate(configured, target, measured_tokens_per_second))
    own = target.priced(configured) if possible else None
    chosen = None if refused & _NO_SCHEDULE else own
    proposed = None if refused & _NO_MODEL else propose(asked, target)
    fewest, larger = None, tuple[str, ...]()
    if lengths_of(asked) and proposed is not None:
        # All parts have the run's layout, so that none is proposed for one of them.
        proposed = [own] if own and target.can_run(own) else []
    elif proposed is not None and not proposed:
        fewest = fewest_gpus(asked, target)
        proposed = propose_smaller_states(asked, target)
        larger = tuple(_larger(asked, target, proposed, fewest))
    shown = chosen
    if proposed and not (chosen and target.can_run(chosen)):
        shown = proposed[0]
    plan = Plan(
        path=path or "configuration",
        asked=asked,
        configured=configured,
        world_size=ranks,
        hardware=target.hardware,
        vocab_size=vocab,
        span=span,
        assumed_vocab_size=not (asked.model.vocab_size or known),
        findings=[],
        memory=target.memory_of(described.cfg, described.prediction) if (described := shown or own) else [],
        schedule=_schedule(shown) if shown else [],
        chosen=chosen,
        shown=shown,
        proposed=proposed,
        fewest=fewest,
        larger=larger,
    )
    findings = [*(out_of_room(plan, own) if own else ()), *findings, *of_plan(plan)]
    named = with_keys_of_stages((with_way_out(finding, plan) for finding in findings), asked)
    return replace(plan, findings=placed(named, path, overrides))


def _settled(cfg: RunConfig, target: Target, possible: bool) -> RunConfig:
    """Return the configuration with what `auto` comes to. `possible` is whether errors leave its layout a meaning."""
    if possible:
        cfg = cfg.model_copy(update={"linear": target.fastest_linear(cfg)})
    if cfg.training.activation_checkpointing == "auto":
        fits = target.fits_with(cfg)
        cfg = with_recomputation(cfg, least_recomputation(cfg.model.num_layers, fits) if possible else "none")
    return cfg


def _schedule(shown: PricedLayout) -> list[ScheduleStage]:
    rows = stages(shown.cfg.tokens_per_step, shown.cfg.training.total_tokens, shown.layout.micro_step)
    return [row for row in rows if begin_of(shown.cfg) <= row.from_tokens < end_of(shown.cfg)]


def _larger(cfg: RunConfig, target: Target, proposed: list[PricedLayout], fits: int | None) -> Iterator[str]:
    """Yield sentences that say what would fit where no layout does with the optimizer as configured. `proposed` are
    layouts with a smaller state, and from `fits` GPUs on the configured optimizer fits."""
    if proposed:
        yield "None fits with the optimizer as configured: these keep its state in less memory, or elsewhere."
    elif (count := fewest_gpus(cfg, target, smaller_states=True)) and count != fits:
        yield (
            f"With the optimizer's state in less memory it fits from {many(count, 'GPU')} on "
            f"({spelled('world_size')} {count})."
        )
    if need := host_memory_to_offload(cfg, target):
        yield f"With parallel.offload it fits where a host has {need} GiB ({spelled('host_memory_gib')} {need})."
    if fits:
        yield f"With the optimizer as configured it fits from {many(fits, 'GPU')} on."


def document_span(data: DataConfig) -> float | None:
    """Return the span of the documents in data.train (model.operations.Rank.span), or None if the files are not
    there."""
    if not (data.document_attention and all(map(inputs.is_there, data.train))):
        return None
    from sagetrain.data.token_file import TokenFile  # This needs numpy, which a plan without data does not need.

    spans, weights = [], []
    try:
        for source in data.train[:: -(-len(data.train) // _SPAN_SOURCES)]:
            paths = source.files
            files = [TokenFile(path) for path in paths[:_SPAN_SOURCES]]
            # The largest file stands for all files of a pattern.
            largest = max(files, key=lambda file: file.num_tokens)
            spans.append(largest.document_span(data.seq_length))
            text = sum(file.num_tokens for file in files) / len(files) * len(paths)
            weights.append(text if source.weight == "proportional" else source.weight)
    except (ConfigError, PermissionError):  # The findings name the file, or the run will.
        return None
    return sum(weight * span for weight, span in zip(weights, spans, strict=True)) / sum(weights)
