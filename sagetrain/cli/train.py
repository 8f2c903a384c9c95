"""The command `sagetrain train`: train a run, or continue it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli import exits
from sagetrain.cli.configuration import checked, named
from sagetrain.cli.exits import Errors, leave_together, misnamed, warn
from sagetrain.cli.options import Config, ConfigOption, Overrides
from sagetrain.config.errors import ConfigError


def _keep(restarts: int, minutes: float, run_dir: str) -> None:
    """Make this process the keeper of its rank (cluster/keeper.py). Return in the processes that train."""
    if not exits.console_script:
        raise ConfigError(
            f"training.restarts {restarts}: the process of the command becomes a keeper, which forks "
            "ranks and never returns. Start `sagetrain train` in a process of its own, or set training.restarts=0"
        )
    from sagetrain.cluster.keeper import keep

    keep(restarts, minutes, Path(run_dir), warn)


def train(
    config: Config = None,
    overrides: Overrides = None,
    config_option: ConfigOption = None,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by the deepspeed launcher.")
    ] = 0,
) -> None:
    """Train, or continue, the run that a YAML file describes.

    \b
    sagetrain train quickstart training.run_dir=runs/mine optimizer.lr=3e-4

    \b
    torchrun --nproc-per-node 8 -m sagetrain train 7b parallel.world_size=8

    \b
    deepspeed --hostfile hostfile --module sagetrain train 7b parallel.world_size=16

    If training.run_dir holds a checkpoint, the run continues from it.
    SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and exit; the same command continues.
    With training.restarts=N a rank that dies leads to new ranks, which continue from the newest checkpoint.

    A shipped configuration (sagetrain config lists them) goes by its name (325m) in any folder; give its paths as
    KEY=VALUE: data.train.0.path, data.valid.0.path (or data.valid=[]) and training.run_dir.
    """
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    # torch's store would print pages about a rank that has gone. SageTrain says which rank it is.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from sagetrain.cluster.launcher import launched, unknown_launcher
    from sagetrain.parallel.host import use_cores

    with Errors() as errors:
        rank, world_size = launched()
        errors.rank = rank
        if (said := unknown_launcher()) and os.environ["LOCAL_RANK"] == "0":
            warn(f"warning: {said}")
        try:
            path, changes = named("train", config, config_option, overrides)
            cfg, findings = checked(path, changes, world_size, show=rank == 0)
            errors.run_dir = Path(cfg.training.run_dir)
            if (said := use_cores()) and rank == 0:
                warn(said)
            # Imported modules stay. Looking for garbage in them takes a fifth of the start.
            gc.disable()
            from sagetrain.interop.looks import looks_of
            from sagetrain.training.build_run import build
            from sagetrain.training.part_by_part import train_parts
            from sagetrain.training.trainer import Trainer

            gc.freeze()
            gc.enable()
            if restarts := cfg.training.restarts:
                _keep(restarts, 2 * cfg.training.timeout_minutes, cfg.training.run_dir)
            looks = looks_of(cfg)
            train_parts(lambda stop: Trainer(build(cfg, stop=stop), findings, *looks))
        except (ConfigError, PermissionError) as error:
            if world_size > 1:
                from sagetrain.cluster import preflight

                preflight.stay_out(misnamed(error) if isinstance(error, PermissionError) else error)
            raise
    leave_together()
