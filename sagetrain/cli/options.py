"""The arguments and options that several commands have."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated, get_args

import typer

from sagetrain.config import arguments
from sagetrain.config.errors import CheckpointError, no_run, url_of


def finite(value: float | None) -> float | None:
    """Return the value of an option. Limits such as `min` let NaN pass, and infinity. Raises typer.BadParameter if the
    value is not finite."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def check_folder(run_dir: Path) -> Path:
    """Check that the path of a run is a folder, which takes no import of torch. Return the folder, or one on this host
    for the URL of a run. Raises ConfigError if the URL is of no run, and CheckpointError if its path is no folder."""
    if url_of(run_dir):
        from sagetrain.cluster.run_copy import here

        return here(run_dir)
    if not run_dir.is_dir():
        raise CheckpointError(no_run(run_dir))
    return run_dir


def _shipped(incomplete: str) -> list[str]:
    """Return the names of shipped configurations and the YAML files here, for completion by tab."""
    from sagetrain.config.load import shipped

    here = [str(path) for path in Path().glob(f"{incomplete}*.yaml")] if "*" not in incomplete else []
    names = [name for name, path in shipped().items() if path.suffix == ".yaml"]
    return [name for name in [*names, *here] if name.startswith(incomplete)]


def _keys(incomplete: str) -> list[str]:
    """Return the keys of the YAML that begin so, each with its equals sign, for completion by tab."""
    from sagetrain.config.reference import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(incomplete)]


Config = Annotated[
    str | None,
    typer.Argument(
        autocompletion=_shipped,
        metavar="CONFIG",
        help="The run's YAML file, or the name of a shipped one (325m); its paths begin in the current folder.",
    ),
]
ConfigOption = Annotated[
    list[Path] | None, typer.Option("--config", "-c", metavar="CONFIG", help="The run's YAML file, as an option.")
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder that holds the run's data now, at any depth. Default: where it was, or beside the run.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=_keys, metavar="[KEY=VALUE]...", help="Overrides of the YAML, e.g. optimizer.lr=3e-4"
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (its training.run_dir), or its run_url.")]
Checkpoint = Annotated[
    int | None,
    typer.Option("--checkpoint", metavar="STEP", min=1, help="Step of the checkpoint to use. Default: the newest."),
]
AttentionName = enum.Enum("AttentionName", {name: name for name in get_args(arguments.LoadedAttention)})  # type: ignore[misc]
InferenceAttention = Annotated[
    AttentionName | None, typer.Option("--attention", help="Compute with this attention. Default: the run's own.")
]
PrecisionName = enum.Enum("PrecisionName", {name: name for name in get_args(arguments.LoadedPrecision)})  # type: ignore[misc]
InferencePrecision = Annotated[
    PrecisionName | None,
    typer.Option(
        "--linear", help="Multiply the blocks' linear layers in this precision. Default: 16 bits, whatever the run had."
    ),
]
