"""All checks of a loaded configuration together, with the place of every key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from sagetrain.config.errors import Finding
from sagetrain.config.guidance import guidance
from sagetrain.config.load import locations
from sagetrain.config.measured import MeasuredRun
from sagetrain.config.rules import data, fit, layout, linear, logging
from sagetrain.config.schema import RunConfig

_ORDER = {"error": 0, "warning": 1, "info": 2}


def check(
    cfg: RunConfig,
    world_size: int,
    *,
    vocab_size: int | None = None,
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    files: bool = True,
    measured: MeasuredRun | None = None,
    others: Iterable[Finding] = (),
) -> list[Finding]:
    """Everything there is to say about a run before it starts, errors first.

    vocab_size: of the tokenizer, when known. path, overrides: what `cfg` was loaded from; findings then name file and
    line. files: whether missing data files are errors (to train) or warnings (to plan on another machine), and missing
    packages errors or nothing. measured: an earlier run whose measurements the guidance takes. others: findings to
    name the place of, too (train/inputs.py).
    """
    findings = [
        *layout.launch(cfg, world_size),
        *fit(cfg, world_size, vocab_size),
        *linear.unreached(cfg),
        *guidance(cfg, measured),
        *data.findings(cfg, required=files),
        *logging.findings(cfg, required=files),
        *others,
    ]
    if path is not None:
        places = locations(path, overrides)
        findings = [dataclasses.replace(finding, where=_place(finding.key, places, path)) for finding in findings]
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def _place(key: str, places: dict[str, str], path: str | Path) -> str:
    """Where a key, or else its nearest parent, was given; the file for a default."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, str(path))
