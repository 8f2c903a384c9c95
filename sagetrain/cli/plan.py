"""The command `sagetrain plan`: predict a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.configuration import named
from sagetrain.cli.exits import leave
from sagetrain.cli.options import Config, ConfigOption, Overrides, finite
from sagetrain.costs.hardware import HARDWARE, cluster_of
from sagetrain.costs.which_gpu import planned_gpu


def plan(
    config: Config = None,
    overrides: Overrides = None,
    config_option: ConfigOption = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Ranks (GPUs) the run will have. Default: parallel.world_size, or 1."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=lambda: [*HARDWARE],
            help=f"GPU to predict memory and step time for, or a part of its name: {', '.join(HARDWARE)}. Default: "
            "this host's GPU, or h200. Rates of h200 and h100 are measured; the others are scaled by data sheets.",
        ),
    ] = None,
    gpus_per_host: Annotated[
        int, typer.Option(min=1, help="GPUs that share NVLink. Hosts are connected by the network.")
    ] = 8,
    network_gbps: Annotated[
        float, typer.Option(min=1, callback=finite, help="Network bandwidth of one GPU, in Gbit/s.")
    ] = 400,
    host_memory: Annotated[
        float | None,
        typer.Option(
            min=1,
            callback=finite,
            metavar="GIB",
            help="Memory of a host in GiB, for parallel.offload. Default: an assumption for the GPU.",
        ),
    ] = None,
    measured_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1,
            callback=finite,
            help="Speed that this configuration reached on one GPU (tensor or context parallel: on one group of GPUs). "
            "The prediction is scaled to it.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Folder of an earlier run. The findings use its measurements of quantization."
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show only the findings and the most important numbers.")
    ] = False,
    show_keys: Annotated[
        bool,
        typer.Option("--keys", help="List the keys of the YAML instead; --keys lr lists those with lr in their name."),
    ] = False,
) -> None:
    """Show what a run will be, on any laptop: parameters, memory, schedules, step time, better layouts, every finding.

    \b
    sagetrain plan 7b --world-size 64 parallel.tensor_parallel_size=8
    """
    from sagetrain.planning.show import show_key_reference, show_plan
    from sagetrain.planning.tables import PAGE, console, print_text

    if show_keys:
        show_key_reference(console(), config or "")
        return
    path, changes = named("plan", config, config_option, overrides)
    page = console(most=PAGE)
    kind, assumed = planned_gpu(gpu)
    hardware = cluster_of(kind, gpus_per_host, network_gbps, host_memory, named=gpu is not None)
    if assumed:
        print_text(page, assumed)
    if show_plan(path, changes, world_size, page, hardware, measured_tokens_per_second, brief, measured):
        leave(2)
