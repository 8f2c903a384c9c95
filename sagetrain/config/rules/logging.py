"""What a run is watched with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import error
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """A package that is not installed. required: to train, here; a plan may be made where it is not."""
    if required and cfg.logging.wandb and find_spec("wandb") is None:
        yield error(
            "wandb_installed",
            "logging.wandb.project",
            cfg.logging.wandb.project,
            "Weights & Biases is not installed here",
            "pip install 'sagetrain[wandb]', or set logging.wandb: null",
        )
