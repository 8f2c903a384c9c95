"""The command `sagetrain config`: print a configuration or a template that comes with SageTrain."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors, warn
from sagetrain.config.errors import ConfigError

_FINETUNE = "Goes on from a run or a Hugging Face folder (--model) on prepared text, chats or prompts (--data)"


def _names(incomplete: str) -> list[str]:
    """Return the names that begin so, for completion by tab."""
    from sagetrain.config.load import shipped

    return [name for name in [*shipped(), "finetune"] if name.startswith(incomplete)]


def print_shipped(
    name: Annotated[
        str | None,
        typer.Argument(
            autocompletion=_names, metavar="NAME", help="One of the names that the command lists without NAME."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For finetune: a run, or a Hugging Face folder.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="For finetune: token files, without suffix, or their folder.")
    ] = None,
) -> None:
    """Print a configuration that comes with SageTrain, to change and train, or a template for a launcher. `finetune`
    prints the complete configuration that fine-tunes a model.

    \b
    sagetrain config 1b > my.yaml

    \b
    sagetrain config slurm > slurm.sbatch

    \b
    sagetrain config finetune --model Qwen3-0.6B --data data/chats > ft.yaml
    """
    with Errors():
        from sagetrain.config.load import shipped

        files = shipped()
        if name == "finetune":
            if model is None or data is None:
                raise ConfigError(
                    "config finetune: name the model to begin with (--model DIR) and the data (--data PATH)"
                )
            from sagetrain.interop.finetuning import finetuning

            typer.echo(finetuning(model, data, warn), nl=False)
        elif model or data:
            raise ConfigError(f"config {name or ''}: --model and --data are for `sagetrain config finetune`")
        elif name is None:
            from sagetrain.planning.tables import console, facts, print_table

            rows = [*((x, _subject(y)) for x, y in files.items()), ("finetune", _FINETUNE)]
            print_table(console(), facts("sagetrain config NAME", rows))
        elif name in files:
            typer.echo(files[name].read_text(), nl=False)
        else:
            known = ", ".join([*files, "finetune"])
            raise ConfigError(f"config {name}: nothing of that name is shipped; there are {known}")


def _subject(path: Path) -> str:
    """Return the first sentence of the comment with which a file begins."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    return (
        re.split(r"[.:](?: |$)", comment)[0]
        or "Variables that the deepspeed launcher hands to all hosts (hostfile says how)"
    )
