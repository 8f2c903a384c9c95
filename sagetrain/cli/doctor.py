"""The command `sagetrain doctor`: check what a machine has and lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors, leave
from sagetrain.cli.options import Config, Overrides
from sagetrain.config.errors import ConfigError


def doctor(
    config: Config = None,
    overrides: Overrides = None,
    disk_mib: Annotated[
        int, typer.Option(min=1, help="MiB to write to the folder of the run, to time the disk. They are removed.")
    ] = 256,
    stress: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Multiply and copy for so many seconds on all GPUs of this host, compare bits with known ones, and "
            "check nothing else.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine has and lacks for training, and what to do about it.

    \b
    sagetrain doctor 7b

    Under a launcher it checks all hosts, their GPUs, and the links between them:

    \b
    torchrun --nproc-per-node 8 -m sagetrain doctor 7b

    \b
    deepspeed --hostfile hostfile --module sagetrain doctor 7b

    With a configuration, it tries attention and 8-bit matmuls at the shapes of a rank, and the disk of
    training.run_dir.

    Before a job, for instance as a prolog of Slurm, it looks for GPUs that compute wrong bits. It is then started once
    on each host, without a launcher:

    \b
    sagetrain doctor --stress 60

    The exit code is 0, or 2 if something is bad.
    """
    with Errors() as errors:
        from sagetrain.cluster.launcher import launched

        rank, world_size = launched()
        errors.rank = rank
        from sagetrain.config.load import load_config
        from sagetrain.config.schema import ParallelConfig
        from sagetrain.doctor import examine, show
        from sagetrain.stress import stress_host

        if stress and (world_size > 1 or config):
            raise ConfigError(
                "--stress takes all GPUs of a host and no configuration: start `sagetrain doctor --stress SECONDS` "
                "once on each host, without a launcher"
            )
        cfg = load_config(Path(config), overrides or []) if config else None
        run_dir, interface = (cfg.training.run_dir, cfg.training.network_interface) if cfg else (".", None)
        model, parallel = (cfg.model, cfg.parallel) if cfg else (None, ParallelConfig())
        checks = stress_host(stress) if stress else examine(model, parallel, Path(run_dir), interface, disk_mib)
        if rank == 0:
            typer.echo(json.dumps([vars(check) for check in checks], indent=2)) if as_json else show(checks)
        code = 2 * (rank == 0 and any(check.verdict == "bad" for check in checks))
    if world_size > 1 or stress:
        # gloo's threads sometimes abort a process that shuts down by itself, and a GPU may have given no answer.
        leave(code)
    raise typer.Exit(code)
