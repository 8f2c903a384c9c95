"""The command `sagetrain eval`: evaluate a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagetrain.cli.exits import Errors, warn
from sagetrain.cli.options import Checkpoint, DataRoot, InferenceAttention, InferencePrecision, RunDir, check_folder
from sagetrain.config.errors import ConfigError, many

if TYPE_CHECKING:
    from sagetrain.inference.evaluate import Evaluation
    from sagetrain.inference.load import TrainedRun
    from sagetrain.interop.lm_eval import HarnessTasks
    from sagetrain.planning.tables import Table


def evaluate(
    run_dir: RunDir,
    num_sequences: Annotated[
        int | None, typer.Option(min=1, help="Held-out sequences, in place of the run's own number.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Evaluate on all of this data: text as prepare reads it, or a token file (NAME, or NAME.bin where a "
            "text NAME is there). Repeatable.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Score all of the data, in windows (sequences) that begin this many tokens apart. Default with "
            "--data: half a window.",
        ),
    ] = None,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    data_root: DataRoot = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Evaluate on tasks of the lm-evaluation-harness instead of text, by name or as YAML files. "
            "Repeatable.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task. Default: all.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a sequence. Default: the run's data.seq_length; for prompts of --tasks, the longest that "
            "the model was trained with.",
        ),
    ] = None,
    attention: InferenceAttention = None,
    linear: InferencePrecision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Report loss, perplexity and bits per byte of a run's newest checkpoint, by source.

    By default it takes the sequences of data.valid that training evaluates on. With --stride it takes all of them, and
    with --data other text.

    \b
    sagetrain eval runs/325m --data docs.txt --data more.jsonl.zst --stride 512

    \b
    sagetrain eval runs/325m --tasks arc_easy,hellaswag --limit 200
    """
    with Errors(run_dir=run_dir):
        run_dir = check_folder(run_dir)
        from sagetrain.inference.requests import EvaluateRequest

        request = EvaluateRequest(data or (), num_sequences, stride, text_key)
        names_of_tasks = [name.strip() for each in tasks or () for name in each.split(",")]
        if names_of_tasks and (request.whole or num_sequences):
            raise ConfigError("--tasks bring text of their own: leave out --data, --stride and --num-sequences")
        if limit and not names_of_tasks:
            raise ConfigError("--limit is for --tasks: name some, or take --num-sequences for data.valid")
        from sagetrain.interop.looks import load_harness
        from sagetrain.parallel.host import use_cores

        use_cores()
        # Tasks are loaded before the model, because they may not exist.
        asked = load_harness("--tasks").HarnessTasks(names_of_tasks, limit) if names_of_tasks else None
        from sagetrain.inference.load import at_context, load_run, with_data

        names = {"attention": attention and attention.value, "linear": linear and linear.value}
        run = load_run(run_dir, warn, checkpoint, **names)
        if not asked:
            run = with_data(run, run_dir, data_root, warn)
        if context:
            run = at_context(run, context)
        if asked:
            _show_tasks(run, asked, as_json)
        else:
            _show_losses(run, request.measure(run, warn), request.windows(run), as_json)


def _show_tasks(run: TrainedRun, tasks: HarnessTasks, as_json: bool) -> None:
    from sagetrain.interop.lm_eval import harness_of
    from sagetrain.planning.tables import Table, console, print_table

    results = tasks.measure(harness_of(run), errors=True)
    if as_json:
        typer.echo(json.dumps({"step": run.step, "tasks": results}, indent=1))
        return
    rows = [
        [
            task,
            metric,
            f"{value:.4f}",
            f"{error:.4f}" if (error := metrics.get(f"{metric}_stderr")) is not None else "-",
        ]
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if not metric.endswith("_stderr")
    ]
    columns = "task", "metric", "value", "standard error"
    title = f"step {run.step}, {run.tokens:,} tokens seen"
    print_table(console(), Table(title, columns, rows, columns[2:]))


def _show_losses(run: TrainedRun, parts: list[Evaluation], stride: int | None, as_json: bool) -> None:
    from sagetrain.inference.evaluate import together
    from sagetrain.planning.tables import console, print_table

    size, every = run.cfg.data.seq_length, together(parts)
    if as_json:
        values = {"sources": [_values(part) for part in parts], "all": _values(every)}
        typer.echo(json.dumps({"step": run.step, "window": size, "stride": stride, **values}, indent=1))
        return
    apart = f"windows of {size:,} tokens, {stride} apart"
    how = apart if stride else f"{many(every.sequences, 'sequence')} of {size:,} tokens"
    title = f"step {run.step}, {run.tokens:,} tokens seen; {how}"
    why = "not all tokens count in the loss" if run.tokenizer else "the run has no tokenizer"
    print_table(console(), _table(title, [*parts, every] if len(parts) > 1 else parts, len(parts) > 1, why))
    if every.chosen:
        print_table(console(), _experts(every))


def _values(part: Evaluation) -> dict[str, Any]:
    return {
        "name": part.name,
        "tokens": part.tokens,
        "bytes": part.bytes,
        "bytes_counted": part.counted,
        "loss": part.loss,
        "perplexity": part.perplexity,
        "bits_per_byte": part.bits_per_byte,
        "unigram_loss": part.unigram_loss,
        **({"experts": {layer: (n / n.sum()).tolist() for layer, n in part.chosen.items()}} if part.chosen else {}),
    }


def _beside_unigram(part: Evaluation) -> str:
    """Say beside which number a loss is read."""
    without = "the unigram loss, the best without context, by the tokens' frequencies in the training data"
    if part.unigram_loss is None:
        return f"a loss is read beside {without}, which is not known here"
    gap = part.unigram_loss - part.loss
    means = "context helps the model" if gap > 0 else "the model does not use context yet: train longer"
    return f"{part.name} is {abs(gap):.4f} {'below' if gap > 0 else 'above'} {without}: {means}"


def _table(title: str, parts: list[Evaluation], total: bool, without_bytes: str) -> Table:
    from sagetrain.planning.tables import Table

    columns = "source", "tokens", "loss", "perplexity", "bits per byte", "unigram loss"
    rows = [
        [
            part.name,
            f"{part.tokens:,}",
            f"{part.loss:.4f}",
            f"{part.perplexity:.1f}",
            "-" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}",
            "-" if part.unigram_loss is None else f"{part.unigram_loss:.4f}",
        ]
        for part in parts
    ]
    counted = f"bytes counted {parts[-1].counted}" if parts[-1].bytes else f"no bytes: {without_bytes}"
    caption = f"losses in nats per token; {counted}; {_beside_unigram(parts[-1])}"
    return Table(title, columns, rows, columns[1:], caption, total)


def _experts(part: Evaluation) -> Table:
    import torch

    from sagetrain.planning.tables import Table
    from sagetrain.stability.balance import Spread

    columns = "layer", "fullest", "largest load", "emptiest", "least load", "entropy"
    rows = []
    for layer, counts in part.chosen.items():
        spread = Spread.of(torch.from_numpy(counts).double())
        ends = [f"{counts.argmax()}", f"{spread.largest:.2f}", f"{counts.argmin()}", f"{spread.least:.2f}"]
        rows.append([f"{layer}", *ends, f"{spread.entropy:.3f}"])
    caption = "loads over the mean of a layer's experts; --json has the share of every expert, by source"
    return Table("choices of experts", columns, rows, columns, caption)
