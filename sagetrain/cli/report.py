"""The command `sagetrain report`: write a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors
from sagetrain.config.errors import many


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders or URLs of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs, which needs no network to be read.

    It has curves over tokens with all runs in each, events (resumes, spikes, changes of precision), and the settings
    that differ.

    \b
    sagetrain report runs/325m runs/325m-sdpa -o runs.html
    """
    with Errors(output=output):
        from sagetrain.cluster.run_copy import here
        from sagetrain.report.page import write_report

        size = write_report([here(run_dir) for run_dir in run_dirs], output)
    typer.echo(f"{output}: {many(len(run_dirs), 'run')}, {size / 1e6:.1f} MB; open it in a browser")
