"""The command `sagetrain import`: turn a Hugging Face folder into a run folder to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors, warn
from sagetrain.config.errors import ConfigError, url_of
from sagetrain.interop.causes import no_folder


def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder of a model, or its URL.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to write; it must not exist yet.")],
    experts: Annotated[
        int | None, typer.Option(metavar="N", help="Make each layer's MLP N experts, copies of it (a dense model).")
    ] = None,
    per_token: Annotated[int, typer.Option(metavar="K", help="Experts of a token.")] = 2,
) -> None:
    """Turn a Hugging Face folder into a run folder to start from, with training.init_from.

    \b
    sagetrain import Qwen3-0.6B runs/qwen3

    \b
    sagetrain import Qwen3-0.6B runs/mixture --experts 8 --per-token 2
    """
    with Errors(run_dir=run_dir):
        if not (folder.is_dir() or url_of(folder)):
            raise ConfigError(no_folder(folder))
        from sagetrain.interop.importing import import_folder as read

        done = read(folder, run_dir, experts=experts, per_token=per_token, report=warn)
    typer.echo(
        f"{run_dir}: {done.architecture}, {done.parameters:,} parameters in {done.tensors} tensors, tokenizer "
        f"{done.tokenizer or 'none'}, sequences of up to {done.seq_length:,} tokens\n"
        f"start from it: sagetrain config finetune --model {run_dir} --data PREPARED > ft.yaml writes a complete "
        f"configuration. In one of yours, set training.init_from: {run_dir}, and take the sections model and attention "
        "of its config.yaml (attention.backend is sdpa there; sage is INT8)"
    )
