"""The commands that examine runs and machines: compare, diagnose, replay, doctor, report. cli.py has the others."""

from __future__ import annotations

import enum
import json
import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli_options import Checkpoint, Config, DataRoot, Overrides, RunDir
from sagetrain.exits import Errors as _Errors
from sagetrain.exits import leave as _exit
from sagetrain.exits import leave_together as _leave_together
from sagetrain.exits import warn as _warn

studies = typer.Typer()

Backend = enum.Enum("Backend", {name: name for name in ("sdpa", "sage", "flash", "reference")})  # type: ignore[misc]
Linear = enum.Enum("Linear", {name: name for name in ("recorded", "bf16")})  # type: ignore[misc]


@studies.command()
def compare(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A.yaml [B.yaml]... [KEY=VALUE]...",
            help="The baseline, what is compared with it, and overrides of all; with --report-only output folders.",
            show_default=False,
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
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from training.seed on: one pair a seed.")] = 3,
    band: Annotated[
        int,
        typer.Option(min=0, help="For so many seeds run the baseline again in another rounding: the rounding band."),
    ] = 0,
    branch: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Let the others go on from the baseline's first checkpoint of so many tokens or more: chance leaves "
            "less between runs that part late. 0: all from the beginning.",
        ),
    ] = 0,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Let runs differ in this key or section, which pairs else share. Repeatable."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Name of the baseline. Default: its file's.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", show_default=False, help="Folder of what comes out. Default: training.run_dir-compare."
        ),
    ] = None,
    run_dirs: Annotated[
        Path | None, typer.Option(show_default=False, help="Folder of the runs. Default: runs, inside of the output.")
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
        typer.Option(min=1, metavar="SECONDS", show_default=False, help="Then save and stop, as on SIGTERM."),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="A gap that does not matter, in nats per token: level is called inside of it.")
    ] = 0.01,
    title: Annotated[str, typer.Option(help="First line of the page. Default: the question.", show_default=False)] = "",
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="Run nothing: the page from output folders, several become one; NAME=FOLDER names its row.",
        ),
    ] = False,
) -> None:
    """Train configurations side by side from the same initialization and samples, and say whether losses differ.

    Runs use the GPUs there are (CUDA_VISIBLE_DEVICES), each as `sagetrain train`. SIGTERM saves and stops all of them;
    the same command continues, with more --seeds or variants it adds them; finished runs are not repeated. The output
    folder gets a page, a plot, tables as json, and losses.jsonl, from which --report-only makes the page again.

    \b
    sagetrain compare base.yaml --variant 'paper: attention.backend=sage attention.recipe=paper' --seeds 4 --band 2
    """
    with _Errors() as errors:
        from sagetrain.compare import command as comparing
        from sagetrain.config.errors import TRAINING_EXIT_CODE, ConfigError
        from sagetrain.config.load import is_assignment

        if not 0 <= margin < math.inf:
            raise ConfigError(
                f"--margin {margin:g}: must be a finite gap of 0 or more, in nats per token; use 0.01, for instance"
            )
        overrides = [] if report_only else [word for word in words if is_assignment(word)]
        named = [word for word in words if word not in overrides]
        failed = 0
        if report_only:
            if output is None and (len(named) > 1 or is_assignment(named[0])):
                raise ConfigError(
                    "several folders, or one whose row gets a name, become a page of its own: name its folder with "
                    "--output; theirs stay as they are"
                )
            found = comparing.read_folders(named)
            output = output or Path(named[0])
        else:
            from sagetrain.compare.question import asked

            question = asked(
                named,
                variant or [],
                row or [],
                overrides,
                baseline=baseline,
                seeds=seeds,
                band=band,
                allow=allow or [],
                branch=branch,
            )
            where = comparing.places(output or question.default_output(), run_dirs, per_gpu)
            errors.output = where.output
            line = shlex.join(["sagetrain", *(context.obj or ())])
            found = comparing.compare(question, where, _warn, command=line, time_limit=time_limit)
            output, failed = where.output, len(found.failed([*question.jobs()]))
        if found.runs or report_only:  # or it was stopped before any run began
            comparing.report(found, output, margin, title, _warn)
        if failed:
            _warn(f"error: {failed} runs failed; the same command tries them again")
            _exit(TRAINING_EXIT_CODE)


@studies.command()
def diagnose(
    run_dir: RunDir,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="INT8 recipe; may come several times. Default: what the run was trained with, else fine."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Sequences to measure on. Default: a micro-batch.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", show_default=False, help="Write the numbers here too.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", show_default=False, help="Draw them (.png).")
    ] = None,
    data_root: DataRoot = None,
    checkpoint: Checkpoint = None,
) -> None:
    """What INT8 attention loses on a checkpoint, layer by layer: the papers' Table 2.

    Attention is computed in INT8 and in float32 from the same queries, keys and values; the table has, for each of its
    tensors, the cosine between the two and the relative L2 norm of their difference. Of a run with linear layers in 8
    bits a table of these follows, with the share of gradients that rounds to zero.

    \b
    sagetrain diagnose runs/325m --recipe paper --recipe fine --plot errors.png
    """
    with _Errors(run_dir=run_dir):
        from sagetrain.data.token_file import write_atomic
        from sagetrain.inference import diagnose as diagnosis
        from sagetrain.inference.load import load_run, with_data
        from sagetrain.parallel.host import use_cores
        from sagetrain.planning.tables import console, print_table

        use_cores()

        diagnosis.check_outputs(json_file, picture)
        run = load_run(run_dir, _warn, checkpoint, linear="bf16")  # those in 8 bits have a table of their own
        run = with_data(run, run_dir, data_root, _warn)
        found = diagnosis.diagnose(run, recipe or [], sequences, _warn)
        for table in diagnosis.tables(found):
            print_table(console(), table)
        if json_file:
            write_atomic(json_file, json.dumps(found.to_json(), indent=1).encode())
        if picture:
            diagnosis.plot(found, picture)


@studies.command()
def replay(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder that a step left: RUN/spikes/step-00000015.")
    ],
    attention: Annotated[
        Backend, typer.Option("--attention", help="What to take the step with, beside what it had.")
    ] = Backend["sdpa"],
    recipe: Annotated[str | None, typer.Option(help="Of --attention sage. Default: the run's.")] = None,
    linear: Annotated[
        Linear, typer.Option(help="Linear layers beside that attention: as the run has them, or in 16 bits.")
    ] = Linear["recorded"],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Take a step that went wrong again, and say whether its data or the precision is to blame.

    From the checkpoint before it, over the same samples, in the precision that it had and with another attention (or
    linear layers in 16 bits, where the run has them in 8). A spike that stays is the data's (or the weights'), one that
    goes away is the precision's, one that does not come back is neither.

    \b
    sagetrain replay runs/325m/spikes/step-00001500 --attention sdpa --linear bf16
    """
    with _Errors() as errors:
        from sagetrain.cluster.launcher import launched
        from sagetrain.parallel.host import use_cores

        errors.rank, _ = launched()
        use_cores()
        from sagetrain.inference.replay import replay as take_again
        from sagetrain.inference.replay import table, to_json

        found = take_again(bundle, attention.value, recipe, linear.value == "bf16")
        if errors.rank == 0:
            typer.echo(json.dumps(to_json(found), indent=1) if as_json else table(found))
    _leave_together()


@studies.command()
def doctor(
    config: Config = None,
    overrides: Overrides = None,
    disk_mib: Annotated[int, typer.Option(min=1, help="Written to the folder of the run, and removed.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine has and lacks for training, and what to do about it.

    \b
    sagetrain doctor configs/7b.yaml

    Under a launcher for all hosts, their GPUs, and the links between them:

    \b
    torchrun --nproc-per-node 8 -m sagetrain doctor configs/7b.yaml

    \b
    deepspeed --hostfile hostfile --module sagetrain doctor configs/7b.yaml

    With a configuration attention and 8-bit matmuls are tried at the shapes that a rank of it has, and the disk where
    its training.run_dir is.
    """
    with _Errors() as errors:
        from sagetrain.cluster.launcher import launched

        rank, world_size = launched()
        errors.rank = rank
        from sagetrain.config.load import load_config
        from sagetrain.config.schema import ParallelConfig
        from sagetrain.doctor import examine, show

        cfg = load_config(Path(config), overrides or []) if config else None
        run_dir, interface = (cfg.training.run_dir, cfg.training.network_interface) if cfg else (".", None)
        model, parallel = (cfg.model, cfg.parallel) if cfg else (None, ParallelConfig())
        checks = examine(model, parallel, Path(run_dir), interface, disk_mib)
        if rank == 0:
            typer.echo(json.dumps([vars(check) for check in checks], indent=2)) if as_json else show(checks)
        code = 2 * (rank == 0 and any(check.verdict == "bad" for check in checks))
    if world_size > 1:
        _exit(code)  # gloo's threads sometimes abort a process that shuts down by itself
    raise typer.Exit(code)


@studies.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs, to look at without a network.

    Curves over tokens with all runs in each, events (resumes, spikes, changes of precision), and the settings that
    differ.

    \b
    sagetrain report runs/325m runs/325m-sdpa -o runs.html
    """
    with _Errors(output=output):
        from sagetrain.report.page import write_report

        size = write_report(run_dirs, output)
    typer.echo(f"{output}: {len(run_dirs)} run{'s' * (len(run_dirs) > 1)}, {size / 1e6:.1f} MB; open it in a browser")
