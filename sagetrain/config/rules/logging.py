"""Rules for the optional packages that track and evaluate a run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import error
from sagetrain.config.schema import RunConfig


def findings(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Find packages that are not installed. `required` is true to train here; a plan may be made without the
    packages."""
    if required and cfg.logging.wandb and find_spec("wandb") is None:
        yield error(
            "wandb_installed",
            "logging.wandb.project",
            cfg.logging.wandb.project,
            "Weights & Biases is not installed here",
            "pip install 'sagetrain[wandb]', or set logging.wandb: null",
        )
    if required and cfg.evaluation.tasks and find_spec("lm_eval") is None:
        yield error(
            "lm_eval_installed",
            "evaluation.tasks",
            cfg.evaluation.tasks,
            "the lm-evaluation-harness is not installed here",
            "pip install 'sagetrain[lm-eval]', or leave the tasks out",
        )
