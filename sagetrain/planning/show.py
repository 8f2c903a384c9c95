"""The output of `sagetrain plan`: the findings, then the run, part by part."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sagetrain.config.arithmetic import checkpoint_tokens, decay_tokens, idle_share, peak_lr, warmup_tokens
from sagetrain.config.earlier_run import read_measured
from sagetrain.config.errors import ConfigError, Finding, many
from sagetrain.config.layer_specs import chosen_layers, layers
from sagetrain.config.layout import Layout
from sagetrain.config.other_names import key_meant
from sagetrain.config.reference import keys
from sagetrain.config.schema import ExpertsConfig, ModelConfig, NoiseAwareTokens, RunConfig
from sagetrain.config.tokens_per_step import ScheduleStage
from sagetrain.costs.accounting import (
    MemoryItem,
    active_parameters,
    checkpoint_bytes,
    flops_per_token,
    num_parameters,
    rank_of,
    save_host_bytes,
    total_bytes,
)
from sagetrain.costs.hardware import H200, Hardware
from sagetrain.costs.stages import blocks_of_chunks
from sagetrain.data.open_files import files_of_rank_0
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.evidence import evidence, tuned
from sagetrain.planning.plan import make_plan
from sagetrain.planning.prediction import StepPrediction
from sagetrain.planning.priced import PricedLayout
from sagetrain.planning.result import Plan
from sagetrain.planning.sampling import sample_seconds
from sagetrain.planning.speed_tables import communication_table, proposal_table, step_table
from sagetrain.planning.tables import PAGE, Table, facts, print_command, print_line, print_table, print_text, size
from sagetrain.training.lr_schedule import learning_rate

_LEVEL_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}
# A ramp has as many stages as it has accumulations. This many rows show its course.
_MAX_ROWS = 12
# A process may usually open this many files.
_USUAL_FILES = 1024
_MEMORY = "Memory per rank at its fullest moment"
_AFTER_ERRORS = "none until the errors above are mended"


def show_plan(
    path: str | Path,
    overrides: Sequence[str],
    world_size: int | None,
    console: Console,
    hardware: Hardware = H200,
    measured_tokens_per_second: float | None = None,
    brief: bool = False,
    measured: Path | None = None,
) -> int:
    """Print the plan of a run on `world_size` ranks (None: as configured, or 1), beside the measurements of an earlier
    run in the folder `measured`. Return the number of errors among the findings. Raises ConfigError if make_plan or
    read_measured refuses its arguments."""
    earlier = read_measured(measured) if measured else None
    plan = make_plan(path, overrides, world_size, hardware, measured_tokens_per_second, earlier)
    _print_findings(console, plan.findings)
    if plan.shown and plan.shown is not plan.chosen:
        words = " ".join(overrides_to(plan.configured, plan.cfg))
        print_text(console, f"The configuration does not run as it is: all figures below are of layout 1, {words}")
    tables = [_brief_table(plan)] if brief else _tables(plan)
    if plan.later:
        print_line(console, "Figures are those of the first part of the run, but for the table of parts.")
        tables.append(_parts_table([plan, *plan.later]))
    for table in tables:
        console.print()
        print_table(console, table)
    if not brief:
        console.print()
        _print_proposals(console, plan)
    return plan.errors


def show_key_reference(console: Console, part: str = "") -> None:
    """Print the keys of the YAML that have `part` in their names, those that begin with it first: the values that they
    take, their defaults and meanings. Raises ConfigError if there is no such key."""
    found = sorted((key for key in keys() if part in key.name), key=lambda key: not key.name.startswith(part))
    if not found:
        sections = dict.fromkeys(key.name.partition(".")[0] for key in keys())
        names = {key.name.rpartition(".")[2]: key.name for key in reversed(keys())} | {name: name for name in sections}
        near = [names[name] for name in difflib.get_close_matches(part.rpartition(".")[2], names)]
        section, _, name = part.rpartition(".")
        meant = f"did you mean {' or '.join(near)}? The" if near else "the"
        if other := key_meant(name, section):
            meant = f"{other}. The"
        raise ConfigError(f"--keys {part}: no key has this in its name; {meant} sections are {', '.join(sections)}")
    # The width is limited in a pipe too, because a meaning is a sentence or two that is read line by line.
    page = min(console.width, PAGE)
    for key in found:
        print_text(console, f"{key.name}  ({key.when_left_out})", "bold", "    ", page)
        for text in (key.takes, key.doc):
            print_text(console, f"    {text}", width=page)


def _print_findings(console: Console, findings: list[Finding]) -> None:
    if not findings:
        print_line(console, "No findings.")
        return
    counts = {level: sum(f.level == level for f in findings) for level in _LEVEL_STYLE}
    plural = {"error": "errors", "warning": "warnings", "info": "info"}
    head = ", ".join(f"{n} {level if n == 1 else plural[level]}" for level, n in counts.items() if n)
    print_line(console, f"Findings: {head}", "bold")
    for finding in findings:
        print_text(console, f"{finding.level} {finding}", _LEVEL_STYLE[finding.level], indent="    ")


def _print_proposals(console: Console, plan: Plan) -> None:
    """Print the best layouts, and the overrides for each."""
    if plan.proposed is None:
        print_line(console, f"Layouts proposed: {_AFTER_ERRORS}", "bold")
        return
    print_table(console, proposal_table(plan, plan.proposed))
    for place, item in enumerate(plan.proposed, 1):
        print_command(console, f"{place}:", overrides_to(plan.configured, item.cfg) or ["as configured"])


def _tables(plan: Plan) -> list[Table]:
    tables = [_model_table(plan)]
    if plan.memory:
        tables += [_layout_table(plan), _memory_table(plan.memory, f"{_MEMORY}, estimated: {plan.name}")]
    if plan.host_memory:
        tables.append(_memory_table(plan.host_memory, "Host memory per rank, estimated", "not measured"))
    if plan.shown:
        tables += [_schedule_table(plan), _run_table(plan, plan.shown)]
        tables += [step_table(plan, plan.shown), communication_table(plan.shown.prediction, plan.name)]
    return tables


def _brief_table(plan: Plan) -> Table:
    """Return a table of the most important facts."""
    parameters = f"{_parameters(plan)} parameters"
    rows = [("model", parameters + f" (vocabulary of {plan.vocab_size:,} assumed)" * plan.assumed_vocab_size)]
    if plan.memory:
        total = total_bytes(plan.memory)
        instead = "" if plan.name == "as configured" else f"{plan.name}: "
        rows.append(("layout", f"{instead}{_ranks(plan.layout)}, {plan.layout.sharding}"))
        usable = size(plan.target.usable)
        rows.append(("memory", f"{size(total)} per rank, of {usable} that {plan.hardware.name} leaves to a run"))
    if plan.shown:
        steps, trained = _length(plan.schedule)
        schedule, sizes = plan.cfg.tokens_per_step, {row.tokens_per_step for row in plan.schedule}
        decided = isinstance(schedule, NoiseAwareTokens)
        if isinstance(schedule, NoiseAwareTokens):
            sizes |= {schedule.floor, schedule.ceiling}
        per_step = " to ".join(f"{tokens:,}" for tokens in sorted({min(sizes), max(sizes)}))
        count = f"steps of {per_step} tokens, decided while training" if decided else f"{steps:,} of {per_step} tokens"
        rows.append(("steps", f"{count}, {trained:,} in all"))
        behind = evidence(plan.shown.cfg, plan.shown.prediction, plan.hardware)
        note = f". {behind.explained(plan.hardware.name)}" if behind.missing else ""
        speed = f"{behind.mark}{_speed(plan.shown.prediction)}: {_duration(trained, plan.shown.prediction)}{note}"
        rows.append(("speed", speed))
    if plan.proposed:
        best = plan.proposed[0]
        words = " ".join(overrides_to(plan.configured, best.cfg))
        mark = evidence(best.cfg, best.prediction, plan.hardware).mark
        rows.append(("fastest layout", f"{mark}{_speed(best.prediction)}: {words}" if words else "as configured"))
    else:
        fits = f"none fits {plan.world_size} x {plan.hardware.name}"
        rows.append(("fastest layout", _AFTER_ERRORS if plan.proposed is None else fits))
    return facts(f"{plan.path} on {plan.world_size} x {plan.hardware.name}", rows)


def _model_table(plan: Plan) -> Table:
    model, attention = plan.cfg.model, plan.cfg.attention
    embedding = plan.vocab_size * model.hidden_size
    note = " (assumed: no tokenizer found, model.vocab_size not set)" if plan.assumed_vocab_size else ""
    backend = attention.backend + (f", recipe {attention.recipe}" if attention.may_be_int8 else "")
    dense = not model.experts or model.experts.dense_layers
    mlp = f"MLP {model.ffn_hidden_size}, " if dense else ""
    smoothing = "smooth_k" if attention.smooth_k else "no smoothing"
    linear, low = plan.cfg.linear, len(plan.cfg.linear.low_bit_blocks(model.num_layers))
    layers = chosen_layers(model, plan.cfg.parallel.tensor_parallel_size).items()
    names = ", ".join(name for name, layer in layers if linear.takes(layer))
    low_bit = f"{linear.precision} in {low} of {model.num_layers} blocks: {names or 'none'}"
    parts = {"first": linear.keep_first_fraction, "last": linear.keep_last_fraction}
    if kept := [f"the {part} {100 * fraction:g} %" for part, fraction in parts.items() if fraction]:
        low_bit += f"; all in 16 bits in {' and '.join(kept)}, which the speeds below leave out"
    if linear.head != "bf16":
        low_bit += f"; output projection {linear.head}"
    done = flops_per_token(model, plan.vocab_size, rank_of(plan.cfg, span=plan.span).span)
    flops = flops_per_token(model, plan.vocab_size, plan.cfg.data.seq_length)
    share, full = (1 - flops_per_token(model, plan.vocab_size, 0) / count for count in (done, flops))
    whole = f" ({flops / 1e9:.2f} G and {full:.0%} over whole sequences)" if plan.cfg.data.document_attention else ""
    return facts(f"Model of {plan.path}", [
        ("parameters", f"{_parameters(plan)} ({embedding:,} of them in the {'tied ' * model.tie_embeddings}embedding)"),
        ("vocabulary", f"{plan.vocab_size:,}, padded{note}"),
        (
            "shape",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {mlp}"
            f"{model.num_attention_heads} heads and {model.num_key_value_heads} key/value heads of {model.head_dim}",
        ),
        ("attention", f"{backend}, QK-norm {attention.qk_norm}, {smoothing}{_windows(plan)}"),
        *([("experts", _experts(model, model.experts))] if model.experts else []),
        ("linear layers", low_bit if low else plan.cfg.training.dtype),
        ("FLOPs per token", f"{done / 1e9:.2f} G, forward and backward; attention is {share:.0%} of it{whole}"),
    ])  # fmt: skip


def _layout_table(plan: Plan) -> Table:
    cfg, world_size, layout, data = plan.cfg, plan.world_size, plan.layout, plan.cfg.data
    split = ", sequence parallel" if cfg.parallel.sequence_parallel else ""
    return facts(f"{'Layout' if plan.shown is plan.chosen else 'Layout 1'} on {many(world_size, 'rank')}", [
        ("ranks", _ranks(layout) + split),
        ("sharding", f"{layout.sharding}, {cfg.training.dtype}"),
        (
            "micro-step",
            f"{many(data.micro_batch_size, 'sequence')} x {data.seq_length:,} tokens "
            f"x {layout.data} = {layout.micro_step:,} tokens",
        ),
        *([("pipeline", _stages(cfg, layout, plan.vocab_size))] if layout.stages > 1 else []),
        *([("open files", f"up to {files:,} in rank 0 and more for token files; the hard limit (ulimit -Hn) counts")]
          if (files := files_of_rank_0(world_size)) > _USUAL_FILES else []),
    ])  # fmt: skip


def _stages(cfg: RunConfig, layout: Layout, vocab_size: int) -> str:
    """Return the chunks of a pipeline and its idle share at the smallest and the largest tokens per step."""
    sizes = cfg.tokens_per_step.named_tokens.values()
    shares = [
        idle_share(layout.stages, layout.chunks, max(1, tokens // layout.micro_step))
        for tokens in (min(sizes), max(sizes))
    ]
    idle = " to ".join(dict.fromkeys(f"{share:.1%}" for share in shares))
    blocks = ", ".join(map(str, blocks_of_chunks(cfg, vocab_size)))
    return f"blocks in chunks: {blocks}; stages idle {idle} of a step at least"


def _ranks(layout: Layout) -> str:
    pipeline = f" x pipeline parallel {layout.stages}" if layout.stages > 1 else ""
    experts = f"; experts over {layout.experts} ranks" if layout.experts > 1 else ""
    return f"tensor parallel {layout.tensor}{layout.sharing}{pipeline} x data parallel {layout.data}{experts}"


def _memory_table(
    items: list[MemoryItem], title: str, but: str = "without CUDA's context, NCCL and fragmentation"
) -> Table:
    total = size(total_bytes(items))
    return Table(
        title,
        ("part", "size", "what"),
        [
            *((item.name, size(item.bytes), item.why) for item in items),
            ("total", total, but),
        ],
        numbers=("size",),
        total=True,
    )


def _schedule_table(plan: Plan) -> Table:
    cfg, stages = plan.cfg, plan.schedule
    if isinstance(cfg.tokens_per_step, NoiseAwareTokens):
        return _bounds_table(cfg, cfg.tokens_per_step, plan.layout.micro_step)
    columns = ("from token", "tokens per step", "micro-steps", "steps", "lr, first step", "lr, last step")
    rows = []
    for row in stages:
        last = row.from_tokens + (row.steps - 1) * row.tokens_per_step
        rates = (f"{_lr(cfg, seen, row.tokens_per_step):.3e}" for seen in (row.from_tokens, last))
        counts = row.from_tokens, row.tokens_per_step, row.accumulation, row.steps
        rows.append((*(f"{count:,}" for count in counts), *rates))
    if len(rows) > _MAX_ROWS:
        between = (f"... {len(rows) - _MAX_ROWS} more", *[""] * 5)
        rows = [*rows[: _MAX_ROWS // 2], between, *rows[-_MAX_ROWS // 2 :]]
    return Table("Schedule", columns, rows, numbers=columns)


def _parts_table(every: Sequence[Plan]) -> Table:
    """Return the table of the parts of a run whose stages have sequences of their own length."""
    numbers = "from token", "sequences", "steps", "memory per rank", "tokens/s", "time"
    rows = []
    for plan in every:
        data, steps = plan.cfg.data, _length(plan.schedule)[0] if plan.schedule else 0
        speed = ("", "")
        if plan.shown and plan.schedule:
            rate = f"{plan.shown.prediction.tokens_per_second:,.0f}"
            speed = rate, _duration(_length(plan.schedule)[1], plan.shown.prediction)
        memory = size(total_bytes(plan.memory)) if plan.memory else ""
        begin = f"{plan.schedule[0].from_tokens:,}" if plan.schedule else "never"
        sequences = f"{data.micro_batch_size} x {data.seq_length:,}"
        rows.append((begin, sequences, f"{steps:,}", memory, *speed))
    return Table("Parts of the run", numbers, rows, numbers=numbers)


def _bounds_table(cfg: RunConfig, schedule: NoiseAwareTokens, micro_step: int) -> Table:
    """Return the table of a schedule whose tokens per step are not known yet."""
    numbers = ("tokens per step", "micro-steps", "steps, if all were so")
    rows = [
        (name, f"{tokens:,}", f"{tokens // micro_step:,}", f"{-(-cfg.training.total_tokens // tokens):,}")
        for name, tokens in (("start", schedule.start), ("floor", schedule.floor), ("ceiling", schedule.ceiling))
    ]
    caption = (
        f"As many as leave quantization's error below {schedule.margin:g} of the gradient noise, in every layer, in "
        f"multiples of {schedule.rounding:,}: changed by a factor of at most {schedule.max_factor:g}, and "
        f"not within {schedule.hold_tokens:,} tokens of the change before. The rest of this plan counts with the start."
    )
    return Table("Schedule, decided while training", ("", *numbers), rows, numbers=numbers, caption=caption)


def _run_table(plan: Plan, shown: PricedLayout) -> Table:
    cfg, prediction, (steps, trained) = plan.cfg, shown.prediction, _length(plan.schedule)
    flops, mark = prediction.flops_per_token * trained, evidence(shown.cfg, prediction, plan.hardware).mark
    tenth = max(1, cfg.training.total_tokens // 10)
    sequences = many(cfg.evaluation.num_sequences, "sequence")
    evaluation = f"every {cfg.evaluation.every_tokens or tenth:,} tokens on {sequences}"
    tasks = f"{', '.join(cfg.evaluation.tasks)}, every {cfg.evaluation.tasks_every_tokens or tenth:,} tokens"
    memory = size(save_host_bytes(cfg, plan.world_size, plan.vocab_size))
    on_disk = size(checkpoint_bytes(cfg, plan.vocab_size))
    return facts("Run", [
        ("length", f"{many(steps, 'step')}, {trained:,} tokens ({many(trained // cfg.data.seq_length, 'sequence')})"),
        (
            "arithmetic",
            f"{flops:.3g} FLOPs; {_duration(trained, prediction)} at the predicted "
            f"{mark}{prediction.tokens_per_second:,.0f} tokens/s, {_gpu_hours(trained, prediction)} GPU-hours",
        ),
        ("learning rate", _lr_text(cfg, plan.schedule)),
        ("tuned", tuned(cfg, num_parameters(cfg.model, cfg.attention, plan.vocab_size))),
        ("evaluation", evaluation if cfg.data.valid else "none: data.valid is empty"),
        *([("tasks", tasks)] if cfg.evaluation.tasks else []),
        *([("samples", _samples_text(plan))] if cfg.evaluation.samples_every_tokens else []),
        (
            "checkpoints",
            f"every {checkpoint_tokens(cfg):,} tokens, the last {cfg.checkpoint.keep_last} kept; written "
            f"in the background from {memory} of host memory per rank; {on_disk} on disk each",
        ),
    ])  # fmt: skip


def _samples_text(plan: Plan) -> str:
    asked = plan.cfg.evaluation
    seconds = sample_seconds(plan.cfg, plan.world_size, plan.vocab_size, plan.hardware)
    what = f"{len(asked.samples_prompts)} of {asked.samples_tokens:,} tokens"
    return f"{what}, every {asked.samples_every_tokens:,} tokens: at most about {seconds:.1f} s each time"


def _lr_text(cfg: RunConfig, stages: list[ScheduleStage]) -> str:
    schedule, total = cfg.lr_schedule, cfg.training.total_tokens
    parts = [f"{schedule.shape}, peak {cfg.optimizer.lr:g}{_lrs_of_kinds(cfg)}"]
    if warmup := warmup_tokens(schedule, total):
        left = [(warmup - row.from_tokens, row) for row in stages]
        steps = sum(min(row.steps, -(-tokens // row.tokens_per_step)) for tokens, row in left if tokens > 0)
        parts.append(f"warm-up over {warmup:,} tokens ({many(steps, 'step')})")
    if schedule.shape == "wsd":
        parts.append(f"decay from token {total - decay_tokens(schedule, total):,}")
    if schedule.shape != "constant":
        parts.append(f"down to {schedule.min_lr:g} at {total:,} tokens")
    reference = schedule.reference_tokens_per_step
    if schedule.batch_rule != "none" and reference:
        parts.append(f"times (tokens per step / {reference:,}){'^0.5' if schedule.batch_rule == 'sqrt' else ''}")
    return ", ".join(parts)


def _lrs_of_kinds(cfg: RunConfig) -> str:
    """Return the words for optimizer.lr_base_width and the kinds of tensors whose peak is not optimizer.lr."""
    optimizer, width = cfg.optimizer, cfg.model.hidden_size
    names = {"embedding": True, "head": not cfg.model.tie_embeddings, "matrix": True, "gain": True,
             "router": cfg.model.experts is not None}  # fmt: skip
    by_muon = optimizer.name == "muon"
    peaks = {kind: peak_lr(optimizer, kind, width, by_muon and kind == "matrix").rate for kind in names if names[kind]}
    rates = [f"{kind} {peak:g}" for kind, peak in peaks.items() if peak != optimizer.lr]
    base = optimizer.lr_base_width
    found = ", ".join(rates)
    return f" at width {base:,}, here {found}" if rates and base not in (None, width) else f" ({found})" * bool(rates)


def _length(stages: list[ScheduleStage]) -> tuple[int, int]:
    """Return the number of steps and of tokens of the run."""
    return sum(stage.steps for stage in stages), sum(stage.steps * stage.tokens_per_step for stage in stages)


def _lr(cfg: RunConfig, tokens_seen: int, tokens_per_step: int) -> float:
    return learning_rate(cfg.optimizer, cfg.lr_schedule, tokens_seen, tokens_per_step, cfg.training.total_tokens)


def _speed(prediction: StepPrediction) -> str:
    return f"{prediction.tokens_per_second:,.0f} tokens/s predicted, MFU {prediction.mfu:.3f}"


def _gpu_hours(tokens: int, prediction: StepPrediction) -> str:
    return f"{tokens / prediction.tokens_per_second * prediction.world_size / 3600:,.0f}"


def _duration(tokens: int, prediction: StepPrediction) -> str:
    seconds = tokens / prediction.tokens_per_second
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return "less than two minutes"


def _parameters(plan: Plan) -> str:
    """Return the number of parameters, and of those that a token meets if there are experts."""
    model = plan.cfg.model, plan.cfg.attention, plan.vocab_size
    active = f" and {active_parameters(*model):,} active" if plan.cfg.model.experts else ""
    return f"{num_parameters(*model):,}{active}"


def _windows(plan: Plan) -> str:
    """Say which layers see a window of tokens only, have a gated delta net or add embeddings to values, and whether
    heads have sinks, or nothing."""
    every = [layer.attention.reach.window for layer in layers(plan.cfg.model)]
    within = len(every) - every.count(None)
    windows = f", a window of {max(filter(None, every)):,} tokens in {within} of {len(every)} layers" if within else ""
    deltas = sum(layer.delta_net is not None for layer in layers(plan.cfg.model))
    delta = f", a gated delta net in {deltas} of {len(every)} layers" * bool(deltas)
    tables = sum(layer.value_embeddings for layer in layers(plan.cfg.model))
    values = f", embeddings added to values in {tables} of {len(every)} layers" * bool(tables)
    return windows + delta + values + ", sinks" * plan.cfg.model.sinks


def _experts(model: ModelConfig, experts: ExpertsConfig) -> str:
    """Say which layers have experts, the way that a token goes, and the balance of the router."""
    balance = experts.balance
    layers = f"in {model.num_layers - experts.dense_layers} of {model.num_layers} layers"
    shared = f" and {experts.shared} shared" if experts.shared else ""
    weights = (
        f"{experts.scores}{', renormalized' * experts.renormalize}{f' x {experts.scale:g}' * (experts.scale != 1)}"
    )
    by = {"auxiliary loss": balance.aux_weight, "z loss": balance.z_weight, "bias": balance.bias_rate}
    balanced = ", ".join(f"{name} {value:g}" for name, value in by.items() if value) or "nothing"
    chosen = f"{experts.per_token} of {experts.number}{shared} of {experts.ffn_size} columns {layers}"
    return f"{chosen}, {weights}; balanced by {balanced}"
