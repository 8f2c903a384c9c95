"""The command `sagetrain diagnose`: measure the error of INT8 attention on a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors, warn
from sagetrain.cli.options import Checkpoint, DataRoot, RunDir, check_folder


def diagnose(
    run_dir: RunDir,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="INT8 recipe. Default: the one the run was trained with, or else fine. Repeatable."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences to measure on. Default: a micro-batch.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the numbers to this file too.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Draw the numbers to this file (.png).")
    ] = None,
    data_root: DataRoot = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Measure the error of INT8 attention on a checkpoint, layer by layer, like the papers' Table 2.

    Attention is computed in INT8 and in float32 from the same queries, keys and values. For each of its tensors, the
    table has the cosine between the two and the relative L2 norm of their difference. If the run has linear layers in 8
    bits, a table of these follows, with the share of gradients that rounds to zero.

    \b
    sagetrain diagnose runs/325m --recipe paper --recipe fine --plot errors.png
    """
    with Errors(run_dir=run_dir):
        run_dir = check_folder(run_dir)
        from sagetrain.data.token_file import write_atomic
        from sagetrain.inference import diagnose as diagnosis
        from sagetrain.inference.load import load_run, with_data
        from sagetrain.parallel.host import use_cores
        from sagetrain.planning.tables import console, print_table

        use_cores()

        diagnosis.check_outputs(json_file, picture)
        # Linear layers in 8 bits have a table of their own.
        run = load_run(run_dir, warn, checkpoint, linear="bf16")
        run = with_data(run, run_dir, data_root, warn)
        found = diagnosis.diagnose(run, recipe or [], sequences, warn)
        for table in diagnosis.tables(found):
            print_table(console(), table)
        if json_file:
            write_atomic(json_file, json.dumps(asdict(found), indent=1).encode())
        if picture:
            diagnosis.plot(found, picture)
