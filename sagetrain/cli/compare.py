"""The command `sagetrain compare`: train configurations side by side."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors, leave, warn
from sagetrain.cli.options import finite
from sagetrain.config.errors import many


def compare(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A.yaml [B.yaml]... [KEY=VALUE]...",
            help="The baseline, the configurations to compare with it, and overrides of all; with --report-only, "
            "output folders.",
        ),
    ],
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: KEY=VALUE ...'", help="Compare the baseline with these overrides too. Repeatable."
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: KEY=VALUE ...'",
            help="Compare everything once more with these overrides (tokens per step, say). Repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each configuration, from training.seed on: one pair per seed.")
    ] = 3,
    band: Annotated[
        int,
        typer.Option(
            min=0, help="Number of seeds for which the baseline is run again with another rounding: the rounding band."
        ),
    ] = 0,
    branch: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Let the other runs continue from the baseline's first checkpoint of at least this many tokens: "
            "chance causes smaller differences between runs that part late. 0: all begin by themselves.",
        ),
    ] = 0,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Let runs differ in this key or section, which pairs otherwise share. Repeatable."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the baseline. Default: the name of its file.")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW:HIGH",
            help="Search the best value of this key instead, among values over the range: at full length if --budget "
            "pays for five of them with --seeds seeds, or else by successive halving.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=1, callback=finite, metavar="TOKENS", help="Tokens of all runs of --tune together, as in 4e8."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the results. Default: training.run_dir-compare, or -tune-KEY."),
    ] = None,
    run_dirs: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: `runs` in the output folder.")
    ] = None,
    per_gpu: Annotated[
        int,
        typer.Option(
            min=1,
            help="Runs at a time on each GPU, one fewer after each that finds its memory full; without a GPU, in all.",
        ),
    ] = 1,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1, callback=finite, metavar="SECONDS", help="Seconds after which all runs save and stop, as on SIGTERM."
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            min=0.0, callback=finite, help="Gap in nats per token that does not matter. A smaller gap is called level."
        ),
    ] = 0.01,
    title: Annotated[str, typer.Option(help="First line of the page. Default: the question.")] = "",
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="Run nothing, and make the page from output folders. Several become one; NAME=FOLDER names a row.",
        ),
    ] = False,
) -> None:
    """Train configurations side by side from the same initialization and samples, and say whether losses differ.

    Runs use the GPUs there are (CUDA_VISIBLE_DEVICES), each as `sagetrain train`. SIGTERM saves and stops all of them;
    the same command continues, with more --seeds or variants it adds them; finished runs are not repeated. The output
    folder gets a page, a plot, tables as json, and losses.jsonl, from which --report-only makes the page again.

    \b
    sagetrain compare base.yaml --variant 'paper: attention.backend=sage attention.recipe=paper' --seeds 4 --band 2

    \b
    sagetrain compare base.yaml --tune optimizer.lr=1e-4:1e-2 --budget 400000000
    """
    with Errors() as errors:
        from sagetrain.comparing import command as comparing
        from sagetrain.config.errors import TRAINING_EXIT_CODE, ConfigError
        from sagetrain.config.load import is_assignment

        overrides = [] if report_only else [word for word in words if is_assignment(word)]
        named = [word for word in words if word not in overrides]
        line = shlex.join(["sagetrain", *(context.obj or ())])
        failed = 0
        if tune or budget is not None:
            from sagetrain.comparing import tuning

            others = {
                "--variant": variant, "--row": row, "--band": band, "--branch": branch, "--baseline": baseline,
                "--title": title, "--report-only": report_only, "a second configuration": named[1:],
                "a second --tune (one key at a time)": (tune or [])[1:],
            }  # fmt: skip
            if not tune or budget is None or any(others.values()) or len(named) != 1:
                given = [name for name, value in others.items() if value]
                raise ConfigError(
                    "one --tune KEY=LOW:HIGH and --budget TOKENS go together, with one configuration and overrides"
                    + (f"; leave out {', '.join(given)}" if given else "")
                )
            search = tuning.TuneRequest(named[0], tune[0], int(budget), overrides, seeds, allow or [])
            key = search.search().key
            where = comparing.places(output or search.default_output(key), run_dirs, per_gpu)
            errors.output = where.output
            rounds = tuning.tune(search, where, warn, command=line, margin=margin, time_limit=time_limit)
            failed = tuning.failed(rounds)
        elif report_only:
            if output is None and (len(named) > 1 or is_assignment(named[0])):
                raise ConfigError(
                    "several folders, or one whose row gets a name, become a page of its own: name its folder with "
                    "--output; theirs stay as they are"
                )
            comparing.report(comparing.read_folders(named), output or Path(named[0]), margin, title, warn)
        else:
            from sagetrain.comparing.compare_request import CompareRequest

            request = CompareRequest(
                named, variant or [], row or [], overrides, baseline, seeds, band, allow or [], branch, output,
                run_dirs, per_gpu,
            )  # fmt: skip
            question = request.question()
            where = request.places(question)
            errors.output = where.output
            found = comparing.compare(question, where, warn, command=line, time_limit=time_limit)
            failed = len(found.failed([*question.jobs()]))
            if found.runs:  # There are none if the command was stopped before any began.
                comparing.report(found, where.output, margin, title, warn)
        if failed:
            warn(f"error: {many(failed, 'run')} failed; the same command tries them again")
            leave(TRAINING_EXIT_CODE)
