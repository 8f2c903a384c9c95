"""Rules for the optional packages that track and evaluate a run, and for names that they take."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig

_FORBIDDEN, _LONGEST = "/\\#?%:", 128
"""The characters that the name of a project at Weights & Biases may not have, and its longest length."""


def findings(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Find packages that are not installed, and names that Weights & Biases refuses. `required` is true to train here;
    a plan may be made without the packages."""
    project = cfg.logging.wandb.project if cfg.logging.wandb else ""
    if len(project) > _LONGEST or {*project} & {*_FORBIDDEN}:
        yield About("wandb_project", "logging.wandb.project", project).error(
            f"is no name at Weights & Biases, which takes up to {_LONGEST} characters, none of {' '.join(_FORBIDDEN)}",
            "choose another name; a team goes into logging.wandb.entity",
        )
    if required and cfg.logging.wandb and find_spec("wandb") is None:
        yield About("wandb_installed", "logging.wandb.project", cfg.logging.wandb.project).error(
            "Weights & Biases is not installed here", "pip install 'sagetrain[wandb]', or set logging.wandb: null"
        )
    if required and cfg.evaluation.tasks and find_spec("lm_eval") is None:
        yield About("lm_eval_installed", "evaluation.tasks", cfg.evaluation.tasks).error(
            "the lm-evaluation-harness is not installed here",
            "pip install 'sagetrain[lm-eval]', or leave the tasks out",
        )
