"""Rules for the section `optimizer`."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import error, no_effect
from sagetrain.config.schema import OptimizerConfig, RunConfig

MATRICES = "q", "k", "v", "out", "gate", "up", "down"
"""The matrices of a block."""
_BF16_STEP = 2**-8
"""A change of a number by less than half of this part is lost in bf16."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Check that an optimizer reads the settings of Muon, that they leave matrices to it, and that moments can
    move."""
    yield from _muon(cfg.optimizer)
    yield from _moments(cfg.optimizer)


def _moments(cfg: OptimizerConfig) -> Iterator[Finding]:
    beta = cfg.betas[1]
    if cfg.moments == "bf16" and 1 - beta < _BF16_STEP:
        yield error(
            "moments_stand_still",
            "optimizer.moments",
            cfg.moments,
            f"rounds to 8 bits, and optimizer.betas {list(cfg.betas)} changes the second moment by {1 - beta:g} of "
            f"itself in a step: below {_BF16_STEP:g} it would stay as it is",
            f"use fp32 or int8, or a second beta of at most {1 - _BF16_STEP:g}",
        )


def _muon(cfg: OptimizerConfig) -> Iterator[Finding]:
    muon = cfg.muon
    if cfg.name != "muon":
        for name, field in type(muon).model_fields.items():
            if getattr(muon, name) != field.get_default():
                key = f"optimizer.muon.{name}"
                yield no_effect(key, getattr(muon, name), f"optimizer.name {cfg.name}; only muon uses it")
    elif {*muon.adamw_matrices} == {*MATRICES}:
        yield error(
            "muon_without_matrices",
            "optimizer.muon.adamw_matrices",
            muon.adamw_matrices,
            "names every matrix, so none is left to Muon",
            "name fewer of them, or use optimizer.name: adamw",
        )
