"""The command `sagetrain export`: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from sagetrain.cli.exits import Errors, warn
from sagetrain.cli.options import Checkpoint, RunDir, check_folder, finite
from sagetrain.config.errors import many, url_of


class ExportDtype(enum.Enum):
    """The dtype of exported weights."""

    float32, bfloat16, float16 = "float32", "bfloat16", "float16"


def export(
    run_dir: RunDir,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder or URL to write; it must not exist yet.")],
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Dtype of the weights. Default: the one the run computed in.")
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Largest size of a file of weights, in GB.")
    ] = 4.0,
    checkpoint: Checkpoint = None,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, which transformers loads.

    \b
    sagetrain export runs/325m 325m-hf --dtype bfloat16
    """
    with Errors(run_dir=run_dir):
        run_dir = check_folder(run_dir)
        from sagetrain.interop.exporting import export as write

        name: Any = dtype.value if dtype else None
        done = write(run_dir, folder, step=checkpoint, dtype=name, shard_bytes=int(shard_gb * 1e9), report=warn)
    typer.echo(
        f"{url_of(folder) or folder}: {done.architecture} of step {done.step}, {done.tensors} tensors, "
        f"{done.bytes:,} bytes in {many(done.shards, 'file')}, max_position_embeddings {done.positions}, "
        f"eos_token_id {done.eos_token_id}"
    )
