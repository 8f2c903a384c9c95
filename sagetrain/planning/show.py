"""The output of `sagetrain plan`: the findings, then the run, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sagetrain.config.arithmetic import (
    checkpoint_tokens,
    data_parallel_size,
    decay_tokens,
    idle_share,
    last_part,
    layers_in_words,
    replicas,
    scheduled_rung,
    sharding_in_words,
    token_multiple,
    warmup_tokens,
)
from sagetrain.config.earlier_run import read_measured
from sagetrain.config.errors import ConfigError, Finding, many
from sagetrain.config.reference import keys
from sagetrain.config.schema import NoiseAwareTokens, PrecisionConfig, RunConfig
from sagetrain.config.tokens_per_step import ScheduleStage
from sagetrain.data.open_files import files_of_rank_0
from sagetrain.hardware import H200, Hardware
from sagetrain.model.accounting import (
    MemoryItem,
    checkpoint_bytes,
    flops_per_token,
    num_parameters,
    rank_of,
    save_host_bytes,
    total_bytes,
)
from sagetrain.model.stages import blocks_of_chunks
from sagetrain.planning.evidence import evidence
from sagetrain.planning.layouts import MORE_TOKENS, Layout, overrides_to, usable_memory
from sagetrain.planning.performance import sample_seconds
from sagetrain.planning.plan import Plan, make_plan
from sagetrain.planning.prediction import StepPrediction
from sagetrain.planning.tables import Table, facts, print_line, print_table, print_text
from sagetrain.training.lr_schedule import learning_rate

_LEVEL_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}
# A ramp has as many stages as it has accumulations. This many rows show its course.
_MAX_ROWS = 12
_PAGE = 100
"""Width in columns of text that is read line by line."""
# A process may usually open this many files.
_USUAL_FILES = 1024
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
    """Print the plan of a run.

    Args:
        path: the configuration file.
        overrides: overrides of its keys.
        world_size: number of ranks. None: that of the configuration, or 1.
        console: where it is printed.
        hardware: the GPU.
        measured_tokens_per_second: see make_plan.
        brief: print only the findings and the most important numbers.
        measured: folder of an earlier run, for its measurements.

    Returns:
        The number of errors among the findings.

    Raises:
        ConfigError: make_plan or read_measured refuses its arguments.
    """
    earlier = read_measured(measured) if measured else None
    plan = make_plan(path, overrides, world_size, hardware, measured_tokens_per_second, earlier)
    _print_findings(console, plan.findings)
    for table in [_brief_table(plan)] if brief else _tables(plan):
        console.print()
        print_table(console, table)
    if not brief:
        console.print()
        _print_proposals(console, plan)
    return plan.errors


def show_key_reference(console: Console, begin: str = "") -> None:
    """Print the keys of the YAML that begin with `begin`: the values that they take, their defaults and meanings.

    Raises:
        ConfigError: there is no such key.
    """
    found = [key for key in keys() if key.name.startswith(begin)]
    if not found:
        sections = ", ".join(dict.fromkeys(key.name.partition(".")[0] for key in keys()))
        raise ConfigError(f"--keys {begin}: no key begins so; the sections are {sections}")
    # The width is limited in a pipe too, because a meaning is a sentence or two that is read line by line.
    page = min(console.width, _PAGE)
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
    print_table(console, _proposal_table(plan, plan.proposed))
    for place, item in enumerate(plan.proposed, 1):
        print_line(console, f"{place}: {' '.join(overrides_to(plan.cfg, item.cfg)) or 'as configured'}")


def _tables(plan: Plan) -> list[Table]:
    tables = [_model_table(plan)]
    if plan.cfg.stability.precision:
        tables.append(_precision_table(plan.cfg, plan.cfg.stability.precision))
    if plan.memory:
        tables += [_layout_table(plan.cfg, plan.world_size, plan.vocab_size), _memory_table(plan.memory)]
    if plan.host_memory:
        tables.append(_memory_table(plan.host_memory, "Host memory per rank, estimated", "not measured"))
    if plan.chosen:
        tables += [_schedule_table(plan), _run_table(plan, plan.chosen.prediction)]
    if plan.priced:
        layout, name = plan.priced
        tables += [_step_table(layout, name, plan), _communication_table(layout.prediction, name)]
    return tables


def _brief_table(plan: Plan) -> Table:
    """Return a table of the most important facts."""
    parameters = f"{num_parameters(plan.cfg.model, plan.cfg.attention, plan.vocab_size):,} parameters"
    rows = [("model", parameters + f" (vocabulary of {plan.vocab_size:,} assumed)" * plan.assumed_vocab_size)]
    if plan.memory:
        total = total_bytes(plan.memory)
        sharded = sharding_in_words(plan.cfg, replicas(plan.cfg, plan.world_size))
        rows.append(("layout", f"{_ranks(plan.cfg, plan.world_size)}, {sharded}"))
        usable = _size(usable_memory(plan.hardware))
        rows.append(("memory", f"{_size(total)} per rank, of {usable} that {plan.hardware.name} leaves to a run"))
    if plan.chosen:
        steps, trained = _length(plan.schedule)
        schedule, sizes = plan.cfg.tokens_per_step, {row.tokens_per_step for row in plan.schedule}
        decided = isinstance(schedule, NoiseAwareTokens)
        if isinstance(schedule, NoiseAwareTokens):
            sizes |= {schedule.floor, schedule.ceiling}
        per_step = " to ".join(f"{tokens:,}" for tokens in sorted({min(sizes), max(sizes)}))
        count = f"steps of {per_step} tokens, decided while training" if decided else f"{steps:,} of {per_step} tokens"
        rows.append(("steps", f"{count}, {trained:,} in all"))
        rows.append(("speed", _speed(plan.chosen.prediction) + f": {_duration(trained, plan.chosen.prediction)}"))
    if plan.proposed:
        best = plan.proposed[0]
        words = " ".join(overrides_to(plan.cfg, best.cfg))
        rows.append(("fastest layout", f"{_speed(best.prediction)}: {words}" if words else "as configured"))
    else:
        fits = f"none fits {plan.world_size} x {plan.hardware.name}"
        rows.append(("fastest layout", _AFTER_ERRORS if plan.proposed is None else fits))
    return facts(f"{plan.path} on {plan.world_size} x {plan.hardware.name}", rows)


def _model_table(plan: Plan) -> Table:
    model, attention = plan.cfg.model, plan.cfg.attention
    parameters = num_parameters(model, attention, plan.vocab_size)
    embedding = plan.vocab_size * model.hidden_size
    note = " (assumed: no tokenizer found, model.vocab_size not set)" if plan.assumed_vocab_size else ""
    backend = attention.backend + (f", recipe {attention.recipe}" if attention.may_be_int8 else "")
    smoothing = ", ".join(name for name in ("smooth_k", "smooth_q") if getattr(attention, name)) or "no smoothing"
    linear, low = plan.cfg.linear, len(plan.cfg.linear.low_bit_blocks(model.num_layers))
    layers = model.linear_layers(plan.cfg.parallel.tensor_parallel_size).items()
    names = ", ".join(name for name, layer in layers if linear.takes(layer))
    low_bit = f"{linear.precision}, recipe {linear.recipe}, in {low} of {model.num_layers} blocks: {names or 'none'}"
    parts = {"first": linear.keep_first_fraction, "last": linear.keep_last_fraction}
    if kept := [f"the {part} {100 * fraction:g} %" for part, fraction in parts.items() if fraction]:
        low_bit += f"; all in 16 bits in {' and '.join(kept)}, which the speeds below leave out"
    done = flops_per_token(model, plan.vocab_size, rank_of(plan.cfg, span=plan.span).span)
    flops = flops_per_token(model, plan.vocab_size, plan.cfg.data.seq_length)
    share, full = (1 - flops_per_token(model, plan.vocab_size, 0) / count for count in (done, flops))
    whole = f" ({flops / 1e9:.2f} G and {full:.0%} over whole sequences)" if plan.cfg.data.document_attention else ""
    return facts(f"Model of {plan.path}", [
        ("parameters", f"{parameters:,} ({embedding:,} of them in the {'tied ' * model.tie_embeddings}embedding)"),
        ("vocabulary", f"{plan.vocab_size:,}, padded{note}"),
        (
            "shape",
            f"{model.num_layers} layers, hidden {model.hidden_size}, MLP {model.ffn_hidden_size}, "
            f"{model.num_attention_heads} heads and {model.num_key_value_heads} key/value heads of {model.head_dim}",
        ),
        ("attention", f"{backend}, QK-norm {attention.qk_norm}, {smoothing}"),
        *([("linear layers", low_bit)] if low else []),
        ("FLOPs per token", f"{done / 1e9:.2f} G, forward and backward; attention is {share:.0%} of it{whole}"),
    ])  # fmt: skip


def _precision_table(cfg: RunConfig, precision: PrecisionConfig) -> Table:
    """Return a table of each layer's lowest precision, by the tokens seen from which on it holds."""
    layers, total = cfg.model.num_layers, cfg.training.total_tokens
    starts = {0, *(last_part(floor.last_fraction, total) for floor in precision.floors if floor.last_fraction)}
    names = [cfg.attention.recipe, *precision.rungs]
    rows = []
    for tokens in sorted(starts):
        rungs = [scheduled_rung(precision, layer, layers, tokens, total) for layer in range(layers)]
        at = [(name, [layer for layer in range(layers) if rungs[layer] == i]) for i, name in enumerate(names)]
        rows.append((f"{tokens:,}", "; ".join(f"{name} in {layers_in_words(held)}" for name, held in at if held)))
    movers = []
    if precision.threshold:
        movers.append(f"a layer by {precision.threshold.metric} above {precision.threshold.above:g}")
    if precision.spike_tokens:
        movers.append(f"all for {precision.spike_tokens:,} tokens after a spike")
    more = f"Further up goes {', and '.join(movers)}. " if movers else ""
    caption = f"{more}Speeds below are those of recipe {names[0]} in all layers, memory that of {names[-1]}."
    return Table("Precision ladder", ("from tokens", "attention"), rows, numbers=("from tokens",), caption=caption)


def _layout_table(cfg: RunConfig, world_size: int, vocab_size: int) -> Table:
    data, ranks = cfg.data, data_parallel_size(cfg, world_size)
    split = ", sequence parallel" if cfg.parallel.sequence_parallel else ""
    sharded = sharding_in_words(cfg, replicas(cfg, world_size))
    return facts(f"Layout on {many(world_size, 'rank')}", [
        ("ranks", _ranks(cfg, world_size) + split),
        ("sharding", f"{sharded}, {cfg.training.dtype}"),
        (
            "micro-step",
            f"{many(data.micro_batch_size, 'sequence')} x {data.seq_length:,} tokens "
            f"x {ranks} = {token_multiple(cfg, ranks):,} tokens",
        ),
        *([("pipeline", _stages(cfg, world_size, vocab_size))] if cfg.parallel.pipeline_parallel_size > 1 else []),
        *([("open files", f"up to {files:,} in rank 0, beside token files: the hard limit (ulimit -Hn) must allow it")]
          if (files := files_of_rank_0(world_size)) > _USUAL_FILES else []),
    ])  # fmt: skip


def _stages(cfg: RunConfig, world_size: int, vocab_size: int) -> str:
    """Return the chunks of a pipeline and its idle share at the smallest and the largest tokens per step."""
    parallel, sizes = cfg.parallel, cfg.tokens_per_step.named_tokens.values()
    multiple = token_multiple(cfg, data_parallel_size(cfg, world_size))
    shares = [
        idle_share(parallel.pipeline_parallel_size, parallel.pipeline_chunks, max(1, tokens // multiple))
        for tokens in (min(sizes), max(sizes))
    ]
    idle = " to ".join(dict.fromkeys(f"{share:.1%}" for share in shares))
    blocks = ", ".join(map(str, blocks_of_chunks(cfg, vocab_size)))
    return f"blocks in chunks: {blocks}; stages idle {idle} of a step at least"


def _ranks(cfg: RunConfig, world_size: int) -> str:
    parallel = cfg.parallel
    context = f" x context parallel {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
    pipeline = f" x pipeline parallel {parallel.pipeline_parallel_size}" if parallel.pipeline_parallel_size > 1 else ""
    copies = data_parallel_size(cfg, world_size)
    return f"tensor parallel {parallel.tensor_parallel_size}{context}{pipeline} x data parallel {copies}"


def _memory_table(
    items: list[MemoryItem],
    title: str = "Memory per rank at its fullest moment, estimated",
    but: str = "without CUDA's context, NCCL and fragmentation",
) -> Table:
    total = _size(total_bytes(items))
    return Table(
        title,
        ("part", "size", "what"),
        [
            *((item.name, _size(item.bytes), item.why) for item in items),
            ("total", total, but),
        ],
        numbers=("size",),
        total=True,
    )


def _schedule_table(plan: Plan) -> Table:
    cfg, stages = plan.cfg, plan.schedule
    if isinstance(cfg.tokens_per_step, NoiseAwareTokens):
        return _bounds_table(cfg, cfg.tokens_per_step, token_multiple(cfg, data_parallel_size(cfg, plan.world_size)))
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


def _run_table(plan: Plan, prediction: StepPrediction) -> Table:
    cfg, (steps, trained) = plan.cfg, _length(plan.schedule)
    flops = prediction.flops_per_token * trained
    tenth = max(1, cfg.training.total_tokens // 10)
    sequences = many(cfg.evaluation.num_sequences, "sequence")
    evaluation = f"every {cfg.evaluation.every_tokens or tenth:,} tokens on {sequences}"
    tasks = f"{', '.join(cfg.evaluation.tasks)}, every {cfg.evaluation.tasks_every_tokens or tenth:,} tokens"
    memory = _size(save_host_bytes(cfg, plan.world_size, plan.vocab_size))
    on_disk = _size(checkpoint_bytes(cfg, plan.vocab_size))
    return facts("Run", [
        ("length", f"{many(steps, 'step')}, {trained:,} tokens ({many(trained // cfg.data.seq_length, 'sequence')})"),
        (
            "arithmetic",
            f"{flops:.3g} FLOPs; {_duration(trained, prediction)} at the predicted "
            f"{prediction.tokens_per_second:,.0f} tokens/s, {_gpu_hours(trained, prediction)} GPU-hours",
        ),
        ("learning rate", _lr_text(cfg, plan.schedule)),
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
    parts = [f"{schedule.shape}, peak {cfg.optimizer.lr:g}"]
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


def _step_table(layout: Layout, name: str, plan: Plan) -> Table:
    prediction, documents, hardware = layout.prediction, layout.cfg.data.document_attention, plan.hardware
    hosts = -(-prediction.world_size // hardware.gpus_per_host)
    title = f"Step time, predicted: {name} on {prediction.world_size} x {hardware.name}"
    title += (f" in {hosts} hosts" if hosts > 1 else "") + ("" if hardware.measured else ", scaled from the H200's")
    title += ", calibrated" if hardware.compute_scale != 1 else ""
    lengths = "the lengths of English text" if plan.span is None else "the lengths in data.train"
    spans = f"packed documents, of {lengths}" if documents else "whole sequences"
    parts = (
        ("compute", prediction.matmul, "matmuls of the blocks and of the head"),
        ("attention", prediction.attention, f"{prediction.attention_backend}, forward and backward; {spans}"),
        (
            "elementwise",
            prediction.elementwise,
            "norms, rotary embedding, SwiGLU, residual stream, softmax of the loss",
        ),
        ("TP exposed", prediction.exposed("tensor"), "tensor-parallel communication that nothing hides"),
        ("CP exposed", prediction.exposed("context"), "all-to-alls around attention"),
        ("DP exposed", prediction.exposed("data"), "gradients and weights between data-parallel ranks, the same"),
        ("optimizer", prediction.optimizer, "passes over gradients, the update, new weights"),
        *_orthogonalizing(prediction),
        *(
            [("offload", prediction.offload, "copies that nothing hides, and the update on the CPU")]
            if prediction.offload
            else []
        ),
        ("overhead", prediction.overhead, "fixed costs of micro-steps and steps"),
        *(
            [("pipeline", prediction.idle, "stages wait while the pipeline fills and drains")]
            if prediction.idle
            else []
        ),
        ("launching", prediction.launching, "kernels wait for the host: a larger data.micro_batch_size helps"),
    )
    tokens = f"{prediction.tokens_per_step:,} tokens in {prediction.accumulation:,} micro-steps"
    per_gpu = f"{prediction.tokens_per_second / prediction.world_size:,.0f} per GPU"
    behind = evidence(layout.cfg, prediction, hardware)
    rate = f"{behind.mark}{prediction.tokens_per_second:,.0f} tokens/s, {per_gpu}, {_mfu(layout)}"
    return Table(
        title,
        ("part", "time", "share", "what"),
        [
            *((name, _milliseconds(part), f"{part / prediction.seconds:.0%}", what) for name, part, what in parts),
            ("total", _milliseconds(prediction.seconds), "", f"{tokens}: {rate}"),
        ],
        numbers=("time", "share"),
        caption=behind.explained(hardware.name),
        total=True,
    )


def _mfu(layout: Layout) -> str:
    """Return the MFU in words, and the figures of perf/mfu and perf/mfu_full_attention where those differ."""
    prediction, others = layout.prediction, []
    mixed = prediction.peak_of_precisions != prediction.peak_flops
    if mixed:
        others.append(f"perf/mfu, by the 16-bit peak: {prediction.mfu_16_bit:.3f}")
    if layout.cfg.data.document_attention:
        others.append(f"perf/mfu_full_attention: {prediction.mfu_full_attention:.3f}")
    peak = "the peaks of its precisions" if mixed else "the 16-bit peak"
    return f"MFU {prediction.mfu:.3f} of {peak}" + (f" ({'; '.join(others)})" if others else "")


def _orthogonalizing(prediction: StepPrediction) -> list[tuple[str, float, str]]:
    """Return the row of Muon's update, where a run has it."""
    row = "orthogonalizing", prediction.orthogonalizing, "Muon's matmuls and passes for the matrices that a rank owns"
    return [row] if prediction.orthogonalizing else []


def _communication_table(prediction: StepPrediction, name: str) -> Table:
    numbers = ("calls", "payload of one", "sent in all", "time", "hidden", "exposed")
    rows = []
    for c in prediction.collectives:
        times = (_milliseconds(seconds) for seconds in (c.seconds, c.seconds - c.exposed, c.exposed))
        rows.append((c.axis, c.purpose, c.kind, f"{c.count:,}", _size(c.payload), _size(c.wire_bytes), *times))
    if not rows:
        return facts(f"Communication per step and rank: {name}", [("none", "one rank")])
    columns = ("axis", "what", "collective", *numbers)
    return Table(f"Communication per step and rank: {name}", columns, rows, numbers=numbers)


def _proposal_table(plan: Plan, proposed: list[Layout]) -> Table:
    """Return a table of the best layouts, with the configured one among them or below."""
    numbers = ("TP", "CP", "PP", "SP", "ZeRO", "recompute", "micro batch", "engine", "tokens/s", "MFU", "memory")
    named = [(str(place), item) for place, item in enumerate(proposed, 1)]
    if plan.chosen and plan.chosen.key not in [item.key for item in proposed]:
        named.append(("now", plan.chosen))
    usable, rows, captions = usable_memory(plan.hardware), [], []
    unmeasured: dict[str, None] = {}
    for place, item in named:
        split, context, pipeline, chunks, sharded, *rest = item.key
        stages = f"{pipeline}x{chunks}" if chunks > 1 else f"{pipeline}"
        behind = evidence(item.cfg, item.prediction, plan.hardware)
        unmeasured |= dict.fromkeys(behind.missing)
        speed = f"{behind.mark}{item.prediction.tokens_per_second:,.0f}", f"{item.prediction.mfu:.3f}"
        memory = _size(item.memory) + (" (!)" if item.memory > usable else "")
        sharding = "yes" if sharded else "no", *map(str, rest)
        rows.append((place, f"{split}", f"{context}", stages, *sharding, *speed, memory))
    if not proposed:
        rows.append(("none", *["-"] * len(numbers)))
    elif proposed[0].cfg.tokens_per_step != plan.cfg.tokens_per_step:
        captions.append(
            "No layout divides tokens_per_step over these ranks and fits: these raise it, to at most "
            f"{MORE_TOKENS:g} times the fewest that would do."
        )
    captions += plan.larger
    if any(item.cfg.parallel.pipeline_chunks > 1 for _, item in named):
        captions.append("PP 4x2: 4 stages of 2 chunks each.")
    if any(item.memory > usable for _, item in named):
        captions.append("(!): more than the GPU has.")
    if unmeasured:
        captions.append(f"~: no recorded run on {plan.hardware.name} has {', '.join(unmeasured)}.")
    title = f"Layouts proposed for {plan.hardware.name}, fastest first"
    return Table(title, ("layout", *numbers), rows, numbers=numbers, caption=" ".join(captions))


def _length(stages: list[ScheduleStage]) -> tuple[int, int]:
    """Return the number of steps and of tokens of the run."""
    last = stages[-1]
    return sum(stage.steps for stage in stages), last.from_tokens + last.steps * last.tokens_per_step


def _lr(cfg: RunConfig, tokens_seen: int, tokens_per_step: int) -> float:
    return learning_rate(cfg.optimizer, cfg.lr_schedule, tokens_seen, tokens_per_step, cfg.training.total_tokens)


def _speed(prediction: StepPrediction) -> str:
    return f"{prediction.tokens_per_second:,.0f} tokens/s predicted, MFU {prediction.mfu:.3f}"


def _size(size: float) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _gpu_hours(tokens: int, prediction: StepPrediction) -> str:
    return f"{tokens / prediction.tokens_per_second * prediction.world_size / 3600:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _duration(tokens: int, prediction: StepPrediction) -> str:
    seconds = tokens / prediction.tokens_per_second
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return "less than two minutes"
