"""The command `sagetrain config`: print a configuration or a template that comes with SageTrain."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors as _Errors
from sagetrain.config.errors import ConfigError


def print_shipped(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", show_default=False, help="One of the names that the command lists without NAME."
        ),
    ] = None,
) -> None:
    """Print a configuration that comes with SageTrain, to change and train, or a template for a launcher.

    \b
    sagetrain config 1b > my.yaml

    \b
    sagetrain config slurm > slurm.sbatch
    """
    with _Errors():
        from sagetrain.config.load import shipped

        files = shipped()
        if name is None:
            from sagetrain.planning.tables import console, facts, print_table

            print_table(console(), facts("sagetrain config NAME", [(x, _subject(y)) for x, y in files.items()]))
        elif name in files:
            typer.echo(files[name].read_text(), nl=False)
        else:
            raise ConfigError(f"config {name}: nothing of that name is shipped; there are {', '.join(files)}")


def _subject(path: Path) -> str:
    """Return the first sentence of the comment with which a file begins."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    return (
        re.split(r"[.:](?: |$)", comment)[0]
        or "Variables that the deepspeed launcher hands to all hosts (hostfile says how)"
    )
