"""`sagetrain plan`: what a run will be, before it is one. No torch, no GPU, no data needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sagetrain.config.arithmetic import data_parallel_size, decay_tokens, padded_vocab_size, token_multiple
from sagetrain.config.check import check
from sagetrain.config.errors import Finding
from sagetrain.config.load import load_config
from sagetrain.config.reference import keys
from sagetrain.config.schema import RunConfig
from sagetrain.data.tokenizer import known_vocab_size
from sagetrain.hardware import H200, Hardware
from sagetrain.model.accounting import flops_per_token, memory_per_rank, num_parameters, save_host_bytes
from sagetrain.planning.layouts import Layout, layout, memory_finding, overrides_to, propose, usable_memory
from sagetrain.planning.performance import StepPrediction, calibrate
from sagetrain.train.lr_schedule import learning_rate
from sagetrain.train.tokens_per_step import ScheduleStage, stages

ASSUMED_VOCAB_SIZE = 32_768
_LEVEL_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}
# A ramp has as many stages as it has accumulations; this many rows show its course.
_MAX_ROWS = 12


def show_plan(
    path: str | Path,
    overrides: Sequence[str],
    world_size: int,
    console: Console,
    hardware: Hardware = H200,
    measured_tokens_per_second: float | None = None,
) -> int:
    """Print the plan of a run on `world_size` ranks; returns the number of errors among the findings.

    measured_tokens_per_second: of this configuration without data parallelism; the prediction is scaled to it.
    Raises ConfigError if the file cannot be loaded, or if no GPU could reach the measured figure.
    """
    cfg = load_config(path, overrides)
    known = known_vocab_size(cfg.data)
    vocab_size = cfg.model.vocab_size or known or ASSUMED_VOCAB_SIZE
    assumed = not (cfg.model.vocab_size or known)
    if measured_tokens_per_second:
        hardware = calibrate(cfg, padded_vocab_size(vocab_size), hardware, measured_tokens_per_second)
    findings = check(
        cfg,
        world_size,
        vocab_size=known,
        path=path,
        overrides=overrides,
        files=False,
    )
    refused = {finding.rule for finding in findings if finding.level == "error"}
    padded = padded_vocab_size(vocab_size)
    console.print(_model_table(cfg, padded, assumed, path))
    chosen = None
    if not refused & _NO_LAYOUT:
        console.print(_layout_table(cfg, world_size))
        console.print(_memory_table(cfg, world_size, padded))
        if not refused & _NO_SCHEDULE:
            chosen = layout(cfg, world_size, padded, hardware)
            console.print(_schedule_table(cfg, world_size))
            console.print(_run_table(cfg, world_size, padded, chosen.prediction))
        too_large = memory_finding(cfg, world_size, padded, hardware)
        findings = [*([too_large] if too_large else []), *findings]
    if not refused & _NO_MODEL:
        proposed = propose(cfg, world_size, padded, hardware)
        console.print(_proposal_table(cfg, chosen, proposed, hardware))
        for place, item in enumerate(proposed, 1):  # whole lines, to be pasted from a terminal of any width
            console.print(f"{place}: {' '.join(overrides_to(cfg, item.cfg)) or 'as configured'}", soft_wrap=True)
        for priced, name in [(chosen, "as configured"), *((item, "layout 1") for item in proposed)]:
            if priced:
                console.print(_step_table(priced.prediction, name, hardware))
                console.print(_communication_table(priced.prediction, name))
                break
    console.print(_findings_text(findings), highlight=False)
    return sum(finding.level == "error" for finding in findings)


def show_key_reference(console: Console) -> None:
    """Print every key of the YAML with what it takes, its default and its meaning."""
    table = Table("key", "takes", "default", "meaning", title="Keys of the configuration", title_justify="left")
    for key in keys():
        table.add_row(key.name, escape(key.takes), escape(key.default), escape(key.doc))
    console.print(table)


# Rules without which the numbers below them would mean nothing.
_NO_MODEL = {"deepspeed_type", "grouped_query_heads"}
_SPLITS = {"tensor_parallel_split", "tensor_parallel_vocab", "context_parallel_split"}
_NO_LAYOUT = {*_NO_MODEL, *_SPLITS, "world_size"}
_NO_SCHEDULE = {"first_stage", "ramp_multiple", "stages_in_order", "warmup_before_end", "whole_micro_steps"}


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _model_table(cfg: RunConfig, vocab_size: int, assumed: bool, path: str | Path) -> Table:
    model, attention = cfg.model, cfg.attention
    table = _facts(f"Model of {escape(str(path))}")
    parameters = num_parameters(model, attention, vocab_size)
    embedding = vocab_size * model.hidden_size
    table.add_row(
        "parameters", f"{parameters:,} ({embedding:,} of them in the {'tied ' * model.tie_embeddings}embedding)"
    )
    note = " (assumed: no tokenizer found, model.vocab_size not set)" if assumed else ""
    table.add_row("vocabulary", f"{vocab_size:,}, padded{note}")
    table.add_row(
        "shape",
        f"{model.num_layers} layers, hidden {model.hidden_size}, MLP {model.ffn_hidden_size}, "
        f"{model.num_attention_heads} heads and {model.num_key_value_heads} key/value heads of {model.head_dim}",
    )
    backend = attention.backend + (f", recipe {attention.recipe}" if attention.backend == "sage" else "")
    smoothing = ", ".join(name for name in ("smooth_k", "smooth_q") if getattr(attention, name)) or "no smoothing"
    table.add_row("attention", f"{backend}, QK-norm {attention.qk_norm}, {smoothing}")
    flops = flops_per_token(model, vocab_size, cfg.data.seq_length)
    share = 1 - flops_per_token(model, vocab_size, 0) / flops
    table.add_row("FLOPs per token", f"{flops / 1e9:.2f} G, forward and backward; attention is {share:.0%} of it")
    return table


def _layout_table(cfg: RunConfig, world_size: int) -> Table:
    parallel, data = cfg.parallel, cfg.data
    ranks = data_parallel_size(cfg, world_size)
    table = _facts(f"Layout on {world_size} {'rank' if world_size == 1 else 'ranks'}")
    split = ", sequence parallel" if parallel.sequence_parallel else ""
    context = f" x context parallel {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
    table.add_row("ranks", f"tensor parallel {parallel.tensor_parallel_size}{context} x data parallel {ranks}{split}")
    table.add_row("ZeRO", f"stage {parallel.zero_stage}, {cfg.training.dtype}")
    table.add_row(
        "micro-step",
        f"{data.micro_batch_size} sequences x {data.seq_length:,} tokens x {ranks} = "
        f"{token_multiple(cfg, ranks):,} tokens",
    )
    return table


def _memory_table(cfg: RunConfig, world_size: int, vocab_size: int) -> Table:
    table = Table(
        "memory per rank",
        "size",
        "what",
        title="Memory per rank at its fullest moment, estimated",
        title_justify="left",
    )
    table.columns[1].justify = "right"
    items = memory_per_rank(cfg, world_size, vocab_size)
    for item in items:
        table.add_row(item.name, _size(item.bytes), item.why)
    table.add_section()
    table.add_row("total", _size(sum(item.bytes for item in items)), "without CUDA's context, NCCL and fragmentation")
    return table


def _schedule_table(cfg: RunConfig, world_size: int) -> Table:
    table = Table(title="Schedule", title_justify="left")
    for name in ("from token", "tokens per step", "micro-steps", "steps", "lr, first step", "lr, last step"):
        table.add_column(name, justify="right")
    rows = stages(cfg.tokens_per_step, cfg.training.total_tokens, _micro_step(cfg, world_size))
    shown = rows if len(rows) <= _MAX_ROWS else [*rows[: _MAX_ROWS // 2], None, *rows[-_MAX_ROWS // 2 :]]
    for row in shown:
        if row is None:
            table.add_row(f"... {len(rows) - _MAX_ROWS} more", *[""] * 5)
            continue
        last = row.from_tokens + (row.steps - 1) * row.tokens_per_step
        table.add_row(
            f"{row.from_tokens:,}",
            f"{row.tokens_per_step:,}",
            f"{row.accumulation:,}",
            f"{row.steps:,}",
            *(f"{_lr(cfg, seen, row.tokens_per_step):.3e}" for seen in (row.from_tokens, last)),
        )
    return table


def _run_table(cfg: RunConfig, world_size: int, vocab_size: int, prediction: StepPrediction) -> Table:
    rows = stages(cfg.tokens_per_step, cfg.training.total_tokens, _micro_step(cfg, world_size))
    steps = sum(row.steps for row in rows)
    trained = rows[-1].from_tokens + rows[-1].steps * rows[-1].tokens_per_step
    flops = flops_per_token(cfg.model, vocab_size, cfg.data.seq_length) * trained
    table = _facts("Run")
    table.add_row("length", f"{steps:,} steps, {trained:,} tokens ({trained // cfg.data.seq_length:,} sequences)")
    rate = prediction.tokens_per_second
    table.add_row("arithmetic", f"{flops:.3g} FLOPs; {_duration(trained / rate)} at the predicted {rate:,.0f} tokens/s")
    table.add_row("learning rate", _lr_text(cfg, rows))
    tenth = max(1, cfg.training.total_tokens // 10)
    evaluation = f"every {cfg.evaluation.every_tokens or tenth:,} tokens on {cfg.evaluation.num_sequences} sequences"
    table.add_row("evaluation", evaluation if cfg.data.valid else "none: data.valid is empty")
    table.add_row(
        "checkpoints",
        f"every {cfg.checkpoint.every_tokens or tenth:,} tokens, the last {cfg.checkpoint.keep_last} kept; written in "
        f"the background from {_size(save_host_bytes(cfg, world_size, vocab_size))} of host memory per rank",
    )
    return table


def _lr_text(cfg: RunConfig, rows: list[ScheduleStage]) -> str:
    schedule, total = cfg.lr_schedule, cfg.training.total_tokens
    parts = [f"{schedule.shape}, peak {cfg.optimizer.lr:g}"]
    if schedule.warmup_tokens:
        left = [(schedule.warmup_tokens - row.from_tokens, row) for row in rows]
        steps = sum(min(row.steps, -(-tokens // row.tokens_per_step)) for tokens, row in left if tokens > 0)
        parts.append(f"warm-up over {schedule.warmup_tokens:,} tokens ({steps:,} steps)")
    if schedule.shape == "wsd":
        parts.append(f"decay from token {total - decay_tokens(schedule, total):,}")
    if schedule.shape != "constant":
        parts.append(f"down to {schedule.min_lr:g} at {total:,} tokens")
    reference = schedule.reference_tokens_per_step
    if schedule.batch_rule != "none" and reference:
        parts.append(f"times (tokens per step / {reference:,}){'^0.5' if schedule.batch_rule == 'sqrt' else ''}")
    return ", ".join(parts)


def _step_table(prediction: StepPrediction, name: str, hardware: Hardware) -> Table:
    hosts = -(-prediction.world_size // hardware.gpus_per_host)
    title = f"Step time, predicted: {name} on {prediction.world_size} x {hardware.name}"
    title += (f" in {hosts} hosts" if hosts > 1 else "") + ("" if hardware.measured else ", scaled from the H200's")
    title += ", calibrated" if hardware.compute_scale != 1 else ""
    table = Table("part", "time", "share", "what", title=title, title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for part, seconds, what in (
        ("compute", prediction.matmul, "matmuls of the blocks and of the head"),
        (
            "attention",
            prediction.attention,
            "forward and backward; packed documents at the rate of English text",
        ),
        (
            "elementwise",
            prediction.elementwise,
            "norms, rotary embedding, SwiGLU, residual stream, softmax of the loss",
        ),
        ("TP exposed", prediction.exposed("tensor"), "tensor-parallel communication that nothing hides"),
        ("CP exposed", prediction.exposed("context"), "all-to-alls around attention"),
        ("DP exposed", prediction.exposed("data"), "gradients and weights between data-parallel ranks, the same"),
        ("optimizer", prediction.optimizer, "DeepSpeed's passes over gradients, Adam, new weights"),
        ("overhead", prediction.overhead, "fixed costs of micro-steps and steps"),
        ("launching", prediction.launching, "kernels wait for the host: a larger data.micro_batch_size helps"),
    ):
        table.add_row(part, _milliseconds(seconds), f"{seconds / prediction.seconds:.0%}", what)
    table.add_section()
    rate = prediction.tokens_per_second
    table.add_row(
        "total",
        _milliseconds(prediction.seconds),
        "",
        f"{prediction.tokens_per_step:,} tokens in {prediction.accumulation:,} micro-steps: {rate:,.0f} tokens/s, "
        f"{rate / prediction.world_size:,.0f} per GPU, MFU {prediction.mfu:.3f}",
    )
    return table


def _communication_table(prediction: StepPrediction, name: str) -> Table:
    table = Table(title=f"Communication per step and rank: {name}", title_justify="left")
    table.add_column("axis")
    table.add_column("what")
    table.add_column("collective")
    for name in ("calls", "payload of one", "sent in all", "time", "hidden", "exposed"):
        table.add_column(name, justify="right")
    for c in prediction.collectives:
        times = (_milliseconds(seconds) for seconds in (c.seconds, c.seconds - c.exposed, c.exposed))
        table.add_row(c.axis, c.purpose, c.kind, f"{c.count:,}", _size(c.payload), _size(c.wire_bytes), *times)
    if not prediction.collectives:
        table.add_row("none", "one rank")
    return table


def _proposal_table(cfg: RunConfig, chosen: Layout | None, proposed: list[Layout], hardware: Hardware) -> Table:
    """The best layouts, and the configured one among them or below."""
    table = Table(title=f"Layouts proposed for {hardware.name}, fastest first", title_justify="left")
    columns = ("", "TP", "CP", "SP", "ZeRO", "recom-\npute", "micro-\nbatch", "tokens/s", "MFU", "memory")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(str(place), item) for place, item in enumerate(proposed, 1)]
    if chosen and chosen.key not in [item.key for item in proposed]:
        rows.append(("now", chosen))
    for place, item in rows:
        split, context, sharded, *rest = item.key
        fits = item.memory <= usable_memory(hardware)
        table.add_row(
            place,
            str(split),
            str(context),
            "yes" if sharded else "no",
            *map(str, rest),
            f"{item.prediction.tokens_per_second:,.0f}",
            f"{item.prediction.mfu:.3f}",
            _size(item.memory) + ("" if fits else " (!)"),
        )
    if not proposed:
        table.add_row("none", *["-"] * (len(columns) - 1))
    elif proposed[0].cfg.tokens_per_step != cfg.tokens_per_step:
        table.caption = (
            "No layout divides tokens_per_step over these ranks and fits: these raise it as little as can be."
        )
    if any(item.memory > usable_memory(hardware) for _, item in rows):
        table.caption = f"{table.caption or ''} (!): more than the GPU has.".strip()
    return table


def _findings_text(findings: list[Finding]) -> str:
    if not findings:
        return "No findings."
    counts = {level: sum(f.level == level for f in findings) for level in _LEVEL_STYLE}
    plural = {"error": "errors", "warning": "warnings", "info": "info"}
    head = ", ".join(f"{n} {level if n == 1 else plural[level]}" for level, n in counts.items() if n)
    lines = [f"[{_LEVEL_STYLE[f.level]}]{f.level}[/] {escape(str(f))}" for f in findings]
    return "\n".join([f"[bold]Findings: {head}[/]", *lines])


def _micro_step(cfg: RunConfig, world_size: int) -> int:
    return token_multiple(cfg, data_parallel_size(cfg, world_size))


def _lr(cfg: RunConfig, tokens_seen: int, tokens_per_step: int) -> float:
    return learning_rate(cfg.optimizer, cfg.lr_schedule, tokens_seen, tokens_per_step, cfg.training.total_tokens)


def _size(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return "less than two minutes"
