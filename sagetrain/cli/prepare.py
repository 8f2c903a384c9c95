"""The command `sagetrain prepare`: turn text into token files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors
from sagetrain.cli.options import finite


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files (.jsonl, .json, .csv, .tsv, .parquet, text; .gz, .bz2, .xz and .zst too), folders, archives "
            "(.tar, .zip), Hugging Face datasets, or python-stdlib: the standard library's own sources."
        ),
    ],
    output: Annotated[  # This is no Path, because a Path would drop the slash at the end of a folder's name.
        str, typer.Option("--output", "-o", metavar="PATH", help="Token file to write, without suffix: data/train.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="SentencePiece model or Hugging Face tokenizer.json. Default: the one beside the output."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Train a new tokenizer of this many tokens first.")] = None,
    tokenizer_sample: Annotated[
        int, typer.Option(min=1, help="Characters of the corpus that a new tokenizer is trained on.")
    ] = 100_000_000,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    prompt_field: Annotated[
        str | None, typer.Option(help="Fine-tuning: field of a prompt, which does not count in the loss.")
    ] = None,
    completion_field: Annotated[
        str | None, typer.Option(help="Fine-tuning: field of the completion, which counts in the loss.")
    ] = None,
    chat_field: Annotated[
        str | None, typer.Option(help="Fine-tuning: field of a chat, a list of messages with role and content.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file that renders chats. Default: the tokenizer's own.")
    ] = None,
    tools_field: Annotated[
        str | None, typer.Option(help="Fine-tuning: field of a chat's tools, for the chat template. Default: tools.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="Fine-tuning: data.seq_length, into which records are put whole.")
    ] = None,
    glob: Annotated[
        str | None, typer.Option(help='Pattern of the files of a folder or archive to read: "**/*.md".')
    ] = None,
    split_on: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text between documents in plain text: '<|endoftext|>', '\\n\\n'. Default: one document a file.",
        ),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    valid_fraction: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.5, callback=finite, help="Share of the documents that goes to `valid` beside the output."
        ),
    ] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that turn text into tokens.")] = os.cpu_count() or 1,
    overwrite: Annotated[
        bool,
        typer.Option(help="Replace files made from something else, and the tokenizer, which checkpoints may need."),
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out and count lines without text instead of stopping.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Prepare the K-th of N parts. Hosts can do one each; train on PATH-*."),
    ] = None,
) -> None:
    """Turn text into token files (.bin and .idx, which Megatron-LM reads too), and train a tokenizer when asked.

    If the command was interrupted, calling it again with the same arguments continues it.

    \b
    sagetrain prepare corpus/*.jsonl.zst -o data/train --vocab-size 32000 --valid-fraction 0.005

    sagetrain prepare chats.jsonl -o chat/train --tokenizer tokenizer.json --chat-field messages --seq-length 4096
    """
    with Errors(output=Path(output)):
        from sagetrain.corpus.prepare import prepare as run
        from sagetrain.corpus.records import records_of
        from sagetrain.corpus.request import Request

        request = Request(
            sources,
            output=output,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            tokenizer_sample=tokenizer_sample,
            text_key=text_key,
            records=records_of(prompt_field, completion_field, chat_field, chat_template, tools_field, seq_length),
            glob=glob,
            dataset_config=dataset_config,
            dataset_split=dataset_split,
            valid_fraction=valid_fraction,
            num_workers=workers,
            overwrite=overwrite,
            skip_bad_lines=skip_bad_lines,
            shard=shard,
            split_on=split_on,
        )
        run(request)
