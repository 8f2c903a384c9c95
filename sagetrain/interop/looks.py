"""Functions that look at a model while it trains: downstream tasks, and samples of its text."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from sagetrain.config.errors import ConfigError
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig

if TYPE_CHECKING:
    from sagetrain.training.trainer import Samples, Tasks


def load_harness(wanted: str) -> ModuleType:
    """Import the module that uses the lm-evaluation-harness. Raises ConfigError if the harness is not installed. The
    message begins with `wanted`, what asks for it."""
    try:
        return import_module("sagetrain.interop.lm_eval")
    except ImportError as error:
        raise ConfigError(
            f"{wanted}: the lm-evaluation-harness cannot be imported ({error}); pip install 'sagetrain[lm-eval]'"
        ) from error


def looks_of(cfg: RunConfig) -> tuple[Tasks | None, Samples | None]:
    """Return what asks evaluation.tasks of a model that trains, and what writes its samples; None for what the
    configuration does not ask for."""
    evaluation, data = cfg.evaluation, cfg.data
    tasks = samples = None
    if evaluation.tasks or evaluation.samples_every_tokens:
        from sagetrain.inference.load import in_training

        trained = partial(in_training, cfg)
    if evaluation.tasks:
        ask = load_harness("evaluation.tasks").tasks_while_training
        tasks = ask(evaluation, data, trained if Layout.of(cfg).whole_between_passes else None)
    if evaluation.samples_every_tokens:
        from sagetrain.inference.samples import samples_while_training
        from sagetrain.training.inputs import context_of

        samples = samples_while_training(evaluation, data, context_of(cfg), trained)
    return tasks, samples
