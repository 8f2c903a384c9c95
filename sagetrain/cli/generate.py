"""The command `sagetrain generate`: continue texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sagetrain.cli.exits import Errors, leave_together, warn
from sagetrain.cli.options import Checkpoint, InferenceAttention, RunDir, check_folder, finite
from sagetrain.config.errors import ConfigError

if TYPE_CHECKING:
    from sagetrain.inference.generate import Completion


def generate(
    run_dir: RunDir,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; -: standard input.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue. Repeatable.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Continue the text of a file (UTF-8), to its last character.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue each line of a file, or each record's prompt of a .jsonl; empty lines are none.",
        ),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Continue each line of standard input as it comes.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="0 takes the likeliest token each time; else at least 1e-6.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0: from all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(
            callback=finite,
            help="Sample only from the fewest of these that together have this probability, above 0 and up to 1.",
        ),
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text, which is not printed. Repeatable.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling. A prompt gets the same text in any batch.")
    ] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer each prompt, as a user's message in the tokenizer's chat template.")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jinja file for --chat. Default: the template that the data was made with, or the tokenizer's own.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are continued at the same time.")] = 8,
    attention: InferenceAttention = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a line of JSON for each prompt: prompt, text, tokens, and why it ended."),
    ] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Continue texts, or with --chat answer them, with a run's newest checkpoint.

    One text is printed while it is written, several in their order, with an empty line between. A model that needs
    several GPUs is spread over the ranks of a launcher:

    \b
    torchrun --nproc-per-node 2 -m sagetrain generate runs/7b "Once"
    """
    with Errors(run_dir=run_dir) as errors:
        from sagetrain.cluster.launcher import launched
        from sagetrain.parallel.host import use_cores

        rank, world_size = launched()
        errors.rank = rank
        run_dir = check_folder(run_dir)
        use_cores()
        from sagetrain.data.chat_template import read_template
        from sagetrain.inference.generate import Sampling
        from sagetrain.inference.load import load_run
        from sagetrain.inference.prompts import read_prompts
        from sagetrain.inference.ranks import Ranks
        from sagetrain.inference.requests import GenerateRequest

        sampling = Sampling(max_tokens, temperature, top_k, top_p, tuple(stop or ()), seed)
        words = [*([prompt] if prompt is not None else []), *(prompts or [])]
        if prompt is not None and prompts:
            raise ConfigError("give either a prompt or --prompt, not both; --prompt is repeatable")
        if interactive and (words or file or prompt_file):
            raise ConfigError("--interactive reads its prompts from standard input: leave the others out")
        if chat_template and not chat:
            raise ConfigError(f"--chat-template {chat_template} is for chats: add --chat")
        ranks = Ranks.join()
        given = [] if interactive else ranks.tell(lambda: read_prompts(words, file, prompt_file))
        template = ranks.tell(lambda: read_template(chat_template)) if chat else ""
        run = load_run(
            run_dir,
            warn if ranks.main else lambda text: None,
            checkpoint,
            attention=attention.value if attention else None,
            ranks=ranks,
        )

        def show(prompts: list[str], batch_size: int) -> None:
            request = GenerateRequest(prompts, sampling, batch_size, chat, template)
            for text in request.remarks(run) if ranks.main else ():
                warn(text)
            _show(request.grown(run), len(prompts), as_json, ranks.main, answers=chat)

        while interactive and (line := ranks.tell(_next_line)) is not None:
            try:
                show([line], 1)
            except ConfigError as error:  # The prompt may be too long, and the next one may be shorter.
                if ranks.main:
                    warn(f"error: {error}")
        if given:
            show(given, batch_size)
    if world_size > 1:
        leave_together()


_WHY_EMPTY = {
    "eos": "the model ends it at once",
    "stop": "it begins with a text of --stop",
    "max_tokens": "--max-tokens ends it before a whole character",
}


def _show(pieces: Iterator[tuple[Completion, str]], count: int, as_json: bool, main: bool, answers: bool) -> None:
    """Print completions in the order of their prompts. A single one is printed as it grows, several when each is
    finished. With `answers`, prompts are left out."""
    finished: dict[int, Completion] = {}
    shown = 0
    streamed = count == 1 and not as_json
    for done, piece in pieces:
        if not main:
            continue
        if done.finish and not (done.text or as_json):
            warn(f"no text follows prompt {done.number + 1}: {_WHY_EMPTY[done.finish]}")
        if streamed:
            typer.echo((piece if shown or answers else done.prompt + piece), nl=bool(done.finish))
            shown = 1
        elif done.finish:
            finished[done.number] = done
            while shown in finished:
                done = finished.pop(shown)
                if as_json:
                    record = {
                        "prompt": done.prompt,
                        "text": done.text,
                        "prompt_tokens": done.prompt_tokens,
                        "tokens": len(done.tokens),
                        "finish": done.finish,
                    }
                    typer.echo(json.dumps(record, ensure_ascii=False))
                else:
                    typer.echo(("\n" if shown else "") + ("" if answers else done.prompt) + done.text)
                shown += 1


def _next_line() -> str | None:
    """Return the next line that the user types and that is not empty, or None at the end of standard input."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            warn(f"error: the line is not UTF-8 ({error.reason}); convert it")
            continue
        if text.strip():
            return text
