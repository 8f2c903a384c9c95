"""The command that says how good a model is: eval. cli.py has the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagetrain.cli_options import Checkpoint, InferenceAttention, RunDir
from sagetrain.config.errors import ConfigError
from sagetrain.exits import Errors as _Errors
from sagetrain.exits import warn as _warn

if TYPE_CHECKING:
    from sagetrain.inference.evaluate import Evaluation
    from sagetrain.planning.tables import Table

evaluation = typer.Typer()


@evaluation.command("eval")
def evaluate(
    run_dir: RunDir,
    num_sequences: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Held-out sequences, in place of the run's own number."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="Evaluate on all of this: a token file, without suffix, or text as prepare reads it. Repeatable.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Score all of the data, in windows of data.seq_length that begin so many tokens apart. Default with "
            "--data: half a window.",
        ),
    ] = None,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    attention: InferenceAttention = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Loss, perplexity and bits per byte of a run's newest checkpoint, by source.

    On the sequences of data.valid that training evaluates on; with --stride on all of them, with --data on other text.

    \b
    sagetrain eval runs/325m --data docs.txt --data more.jsonl.zst --stride 512
    """
    with _Errors(run_dir=run_dir):
        from sagetrain.inference import evaluate as evaluating
        from sagetrain.inference.load import load_run
        from sagetrain.parallel.host import use_cores
        from sagetrain.planning.tables import console, print_table

        use_cores()
        whole = bool(data or stride)
        if whole and num_sequences:
            raise ConfigError(
                "--num-sequences chooses among those of data.valid; with --data or --stride all are taken"
            )
        run = load_run(run_dir, _warn, checkpoint, attention=attention.value if attention else None)
        size = run.cfg.data.seq_length
        if whole:
            step = stride or evaluating.default_stride(size)
            how = f"windows of {size:,} tokens, {step:,} apart"
            found = evaluating.evaluate_texts(run, data or (), step, text_key=text_key, report=_warn)
        else:
            step, asked = None, num_sequences or run.cfg.evaluation.num_sequences
            found = evaluating.evaluate(run, asked, _warn)
            taken = sum(part.tokens for part in found) // size
            how = f"{taken:,} sequences of {size:,} tokens"
            if taken < asked:
                _warn(f"{asked:,} sequences were asked for, and the held-out data has {taken:,}: all are taken")
        every = evaluating.together(found)
        if as_json:
            parts = {"sources": [_values(part) for part in found], "all": _values(every)}
            typer.echo(json.dumps({"step": run.step, "window": size, "stride": step, **parts}, indent=1))
        else:
            title = f"step {run.step}, {run.tokens:,} tokens seen; {how}"
            print_table(console(), _table(title, [*found, every] if len(found) > 1 else found, len(found) > 1))


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
    }


def _table(title: str, parts: list[Evaluation], total: bool) -> Table:
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
    counted = f"bytes counted {parts[-1].counted}" if parts[-1].bytes else "no bytes: the run has no tokenizer"
    caption = (
        f"losses in nats per token; {counted}; unigram: by the tokens' frequencies in the training data, the best "
        "without context"
    )
    return Table(title, columns, rows, columns[1:], caption, total)
