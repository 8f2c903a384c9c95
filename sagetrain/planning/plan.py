"""The plan of a run, computed before the run starts; show.py prints it. It needs no torch and no GPU. Of the data it
reads the lengths of documents, if the data is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.config.arithmetic import data_parallel_size, may_be_low_bit, padded_vocab_size, token_multiple
from sagetrain.config.check import check
from sagetrain.config.earlier_run import MeasuredRun
from sagetrain.config.errors import ConfigError, Finding, many
from sagetrain.config.linear_sizes import AUTO_PRECISION
from sagetrain.config.load import load_config
from sagetrain.config.rules.findings import warning
from sagetrain.config.schema import SIXTEEN_BITS, DataConfig, LinearConfig, Recomputation, RunConfig
from sagetrain.config.tokens_per_step import ScheduleStage, stages
from sagetrain.data.tokenizer import known_tokenizer
from sagetrain.hardware import Hardware
from sagetrain.model.accounting import MemoryItem, total_bytes, with_recomputation
from sagetrain.model.host_memory import host_memory_per_rank
from sagetrain.planning.calibration import calibrate
from sagetrain.planning.layouts import (
    Layout,
    by_other_engine,
    fastest_linear,
    fewest_gpus,
    fits_with,
    host_finding,
    host_memory_to_offload,
    layout,
    memory_finding,
    memory_of,
    propose,
    propose_smaller_states,
)
from sagetrain.planning.performance import predict
from sagetrain.training import inputs

ASSUMED_VOCAB_SIZE = 32_768
# Without these rules the numbers would mean nothing.
_NO_MODEL = {"deepspeed_type", "grouped_query_heads", "linear_precision_of_gpu", "linear_recipe"}
_SPLITS = {"tensor_parallel_split", "tensor_parallel_vocab", "context_parallel_split", "pipeline_split"}
_NO_LAYOUT = {*_NO_MODEL, *_SPLITS, "world_size"}
_NO_SCHEDULE = {
    "first_stage",
    "noise_aware_bounds",
    "noise_aware_multiple",
    "ramp_multiple",
    "stages_in_order",
    "warmup_before_end",
    "whole_micro_steps",
}
# Two predictions that differ by less than 3 % may be in the wrong order.
_FASTER = 1.03
# document_span takes the mean of at most this many sources.
_SPAN_SOURCES = 64
_OF_LAYOUT = {"world_size", "whole_micro_steps", "ramp_multiple", "noise_aware_floor", "gpu_memory"}
"""Rules that another layout may satisfy."""


@dataclass(frozen=True)
class Plan:
    """The plan of a configuration on a number of ranks. Parts that its errors leave without meaning are missing."""

    path: str | Path
    cfg: RunConfig
    world_size: int
    hardware: Hardware
    vocab_size: int
    """Padded vocabulary size."""
    assumed_vocab_size: bool
    span: float | None
    """Span of the documents of data.train (model.operations.Rank.span). None if the data is not there."""
    findings: list[Finding]
    memory: list[MemoryItem]
    """Memory of one rank. Empty without a valid layout."""
    host_memory: list[MemoryItem]
    """Memory of its host that one rank takes with parallel.offload. Empty without it."""
    schedule: list[ScheduleStage]
    """Schedule of tokens per step. Empty if the layout or the schedule is not valid."""
    chosen: Layout | None
    """The configured layout. It is there if `schedule` is."""
    proposed: list[Layout] | None
    """The fastest layouts; empty if none fits. None if another layout would not correct the errors."""
    larger: tuple[str, ...] = ()
    """Sentences that say what would fit where no layout does with the optimizer as configured."""

    def __repr__(self) -> str:
        speed = f", {self.chosen.prediction.tokens_per_second:,.0f} tokens/s predicted" if self.chosen else ""
        memory = f", {total_bytes(self.memory) / 2**30:.2f} GiB per rank" if self.memory else ""
        found = f"{self.errors} errors and {len(self.findings) - self.errors} other findings"
        return f"Plan({self.path} on {self.world_size} x {self.hardware.name}: {found}{memory}{speed})"

    @property
    def errors(self) -> int:
        """The number of findings that would stop the run."""
        return sum(finding.level == "error" for finding in self.findings)

    @property
    def priced(self) -> tuple[Layout, str] | None:
        """The layout whose step is shown in detail, and its name in the output."""
        if self.chosen:
            return self.chosen, "as configured"
        return (self.proposed[0], "layout 1") if self.proposed else None


def make_plan(
    config: RunConfig | str | Path,
    overrides: Sequence[str],
    world_size: int | None,
    hardware: Hardware,
    measured_tokens_per_second: float | None = None,
    measured: MeasuredRun | None = None,
) -> Plan:
    """Make the plan of a run.

    Args:
        config: the configuration, or its file.
        overrides: overrides of its keys.
        world_size: number of ranks. None: that of the configuration, or 1.
        hardware: the GPU.
        measured_tokens_per_second: measured speed of this configuration without data parallelism; the prediction is
            scaled to it.
        measured: an earlier run, for the findings about its measurements.

    Raises:
        ConfigError: the file cannot be loaded, or no GPU could reach the measured speed.
    """
    path = None if isinstance(config, RunConfig) else config
    cfg, kept = inputs.as_continued(config if isinstance(config, RunConfig) else load_config(config, overrides))
    asked = cfg
    world_size = world_size or cfg.parallel.world_size or 1
    tokenizer = known_tokenizer(cfg.data)
    known = tokenizer.vocab_size if tokenizer else None
    padded = padded_vocab_size(cfg.model.vocab_size or known or ASSUMED_VOCAB_SIZE)
    span = document_span(cfg.data)
    findings = check(
        cfg,
        world_size,
        vocab_size=known,
        path=path,
        overrides=overrides,
        files=False,
        measured=measured,
        others=inputs.findings(cfg, tokenizer),
    )
    findings = [*findings, *([kept] if kept else [])]
    possible = not _NO_LAYOUT & {f.rule for f in findings if f.level == "error"}
    if cfg.linear.precision == "auto" and possible:
        cfg = cfg.model_copy(update={"linear": fastest_linear(cfg, padded, hardware, span)})
        findings = [*findings, *([_priced(cfg.linear)] if may_be_low_bit(asked) else [])]
    if cfg.training.activation_checkpointing == "auto":
        fits_in = fits_with(cfg, world_size, padded, hardware)
        again = least_recomputation(cfg.model.num_layers, fits_in) if possible else "none"
        cfg = with_recomputation(cfg, again)
        findings = [*findings, _chosen_recomputation(again)]
    if cfg.linear.low_bit and cfg.linear.precision not in hardware.precisions:
        findings = [_no_arithmetic(cfg, hardware), *findings]
    elif measured_tokens_per_second and possible:
        hardware = calibrate(cfg, padded, hardware, measured_tokens_per_second, span)
    refused = {finding.rule for finding in findings if finding.level == "error"}
    memory: list[MemoryItem] = []
    host_memory: list[MemoryItem] = []
    schedule: list[ScheduleStage] = []
    chosen = None
    if not refused & _NO_LAYOUT:
        memory = memory_of(cfg, predict(cfg, world_size, padded, hardware, span), padded)
        too_large = memory_finding(total_bytes(memory), world_size, hardware)
        host_memory = host_memory_per_rank(cfg, world_size, padded)
        no_room = host_finding(cfg, world_size, padded, hardware)
        findings = [*filter(None, (too_large, no_room)), *findings]
        if not refused & _NO_SCHEDULE:
            multiple = token_multiple(cfg, data_parallel_size(cfg, world_size))
            schedule = stages(cfg.tokens_per_step, cfg.training.total_tokens, multiple)
            chosen = layout(cfg, world_size, padded, hardware, span)
            if asked.linear.low_bit:
                wide = cfg.model_copy(update={"linear": SIXTEEN_BITS})
                gain = _gain(cfg, chosen, layout(wide, world_size, padded, hardware, span))
                findings = [*findings, *([gain] if gain else [])]
    proposed = None if refused & _NO_MODEL else propose(asked, world_size, padded, hardware, span)
    fits, larger = None, tuple[str, ...]()
    if proposed is not None and not proposed:
        fits = fewest_gpus(asked, world_size, padded, hardware)
        proposed = propose_smaller_states(asked, world_size, padded, hardware, span)
        larger = tuple(_larger(asked, world_size, padded, hardware, proposed, fits))
    if proposed:
        findings = [_with_way_out(finding) for finding in findings]
    elif fits:
        findings = [_with_more_gpus(finding, world_size, fits, hardware) for finding in findings]
    findings = [*findings, *_uncertain(cfg, chosen, hardware)]
    if chosen and (faster := _faster_attention(cfg, chosen, world_size, padded, hardware, span)):
        findings = [*findings, faster]
    if chosen and (faster := _faster_engine(chosen, by_other_engine(cfg, world_size, padded, hardware, span))):
        findings = [*findings, faster]
    return Plan(
        path=path or "configuration",
        cfg=cfg,
        world_size=world_size,
        hardware=hardware,
        vocab_size=padded,
        span=span,
        assumed_vocab_size=not (cfg.model.vocab_size or known),
        findings=findings,
        memory=memory,
        host_memory=host_memory,
        schedule=schedule,
        chosen=chosen,
        proposed=proposed,
        larger=larger,
    )


def _larger(
    cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware, proposed: list[Layout], fits: int | None
) -> Iterator[str]:
    """Yield sentences that say what would fit where no layout does with the optimizer as configured. `proposed` are
    layouts with a smaller state, and from `fits` GPUs on the configured optimizer fits."""
    if proposed:
        yield "None fits with the optimizer as configured: these keep its state in less memory, or elsewhere."
    elif (count := fewest_gpus(cfg, world_size, vocab_size, hardware, smaller_states=True)) and count != fits:
        yield f"With the optimizer's state in less memory it fits from {many(count, 'GPU')} on (--world-size {count})."
    if need := host_memory_to_offload(cfg, world_size, vocab_size, hardware):
        yield f"With parallel.offload it fits where a host has {need} GiB (--host-memory {need})."
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


def _chosen_recomputation(how: Recomputation) -> Finding:
    return Finding(
        "recomputation",
        "info",
        "training.activation_checkpointing",
        "auto",
        f"is {how} here: the least that fits into the memory of this GPU by the estimate of this plan",
        "name a value to have it on every GPU",
    )


def _priced(linear: LinearConfig) -> Finding:
    """Build the finding that says which precision the figures are for where the run decides."""
    size = f" for layers of {linear.keep_layers_below:,} weights and more" if linear.keep_layers_below else ""
    what = f"{linear.precision}, recipe {linear.recipe}{size}" if linear.low_bit else "bf16"
    says = f"is priced as {what}, the faster of bf16 and {AUTO_PRECISION} by these figures; the run times it"
    fix = f"what {AUTO_PRECISION} costs in loss is in docs/low-bit-linear.md; bf16 leaves all layers in 16 bits"
    return Finding("linear_precision_auto", "info", "linear.precision", "auto", says, fix if linear.low_bit else "")


def _no_arithmetic(cfg: RunConfig, hardware: Hardware) -> Finding:
    """Build the finding for linear layers in a precision that the GPU does not have."""
    precision = cfg.linear.precision
    others = [name for name in ("bf16", "int8") if name in hardware.precisions]
    return Finding(
        "linear_precision_of_gpu",
        "error",
        "linear.precision",
        precision,
        f"{hardware.name} has no {precision} matmuls",
        f"use {' or '.join(others)}, or plan for another GPU (--gpu)",
    )


def _uncertain(cfg: RunConfig, chosen: Layout | None, hardware: Hardware) -> Iterator[Finding]:
    """Find what is slow on this GPU because of its design, and rates that belong to another GPU's kernels."""
    fp8, int8 = (hardware.precisions.get(name, 0.0) for name in ("fp8", "int8"))
    if cfg.linear.precision == "fp8" and int8 > 1.5 * fp8 > 0:
        yield warning(
            "linear_fp8_half_rate",
            "linear.precision",
            "fp8",
            f"{hardware.name} adds FP8 products up at half rate: INT8 products are {int8 / fp8:.1f} times as fast",
            "use linear.precision int8 or auto",
        )
    backend = chosen.prediction.attention_backend if chosen else ""
    if backend.startswith("sage") and hardware.int8_attention:
        why, _, fix = hardware.int8_attention.partition(": ")
        yield warning(
            "int8_attention_rate", "attention.backend", backend, f"INT8 attention on {hardware.name}: {why}", fix
        )


def _gain(cfg: RunConfig, low: Layout, wide: Layout) -> Finding | None:
    """Return a finding if the casts of linear layers take longer than their matmuls save. `wide` is the same layout in
    16 bits."""
    ours, theirs = (each.prediction.tokens_per_second for each in (low, wide))
    if ours > 1.01 * theirs:
        return None
    return Finding(
        "linear_precision_gain",
        "warning",
        "linear.precision",
        cfg.linear.precision,
        f"is not predicted to be faster with recipe {cfg.linear.recipe}: {ours:,.0f} tokens/s, with bf16 {theirs:,.0f}",
        "use linear.precision bf16, another linear.recipe, or larger micro-batches where the host is the limit",
    )


def _faster_attention(
    cfg: RunConfig, chosen: Layout, world_size: int, vocab_size: int, hardware: Hardware, span: float | None
) -> Finding | None:
    """Return a finding if another attention backend or recipe is predicted to be faster than the one that is named."""
    if (cfg.attention.backend, cfg.attention.recipe) == ("auto", "auto"):
        return None
    attention = cfg.attention.model_copy(update={"backend": "auto", "recipe": "auto"})
    best = layout(cfg.model_copy(update={"attention": attention}), world_size, vocab_size, hardware, span).prediction
    if best.tokens_per_second < _FASTER * chosen.prediction.tokens_per_second:
        return None
    backend, _, recipe = best.attention_backend.partition(" ")
    return Finding(
        "faster_attention",
        "info",
        "attention.backend",
        chosen.prediction.attention_backend,
        f"{best.attention_backend} is predicted to be faster here: {best.tokens_per_second:,.0f} tokens/s, "
        f"{chosen.prediction.tokens_per_second:,.0f} as configured",
        f"use attention.backend auto with recipe auto, which times them, or backend {backend}"
        + (f" with recipe {recipe}" if recipe else ""),
    )


def _faster_engine(chosen: Layout, other: Layout | None) -> Finding | None:
    """Return a finding if the same layout is predicted to be faster by the other engine."""
    ours, theirs = (each.prediction.tokens_per_second if each else 0.0 for each in (chosen, other))
    if other is None or theirs < _FASTER * ours:
        return None
    engine = other.cfg.parallel.engine
    return Finding(
        "faster_engine",
        "info",
        "parallel.engine",
        chosen.cfg.parallel.engine,
        f"{engine} is predicted to be faster here: {theirs:,.0f} tokens/s, {ours:,.0f} as configured",
        f"set parallel.engine: {engine}",
    )


def _with_more_gpus(finding: Finding, world_size: int, fits: int, hardware: Hardware) -> Finding:
    """Return a finding about memory that also says from how many GPUs on the run fits."""
    if finding.rule != "gpu_memory":
        return finding
    ranks = f"no layout of {many(world_size, 'GPU')} fits"
    return replace(
        finding, fix=f"{ranks}: from {fits} {hardware.name} on one does (--world-size {fits}); or {finding.fix}"
    )


def _with_way_out(finding: Finding) -> Finding:
    """Return a finding whose fix also offers the proposed layouts, if another layout can correct it."""
    if finding.rule not in _OF_LAYOUT:
        return finding
    return replace(finding, fix=f"{finding.fix}, or take one of the layouts proposed below")
