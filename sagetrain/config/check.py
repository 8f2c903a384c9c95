"""All checks of a loaded configuration together. Each finding gets the place where its key was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sagetrain.config.earlier_run import MeasuredRun
from sagetrain.config.errors import ConfigError, Finding
from sagetrain.config.guidance import guidance
from sagetrain.config.load import located
from sagetrain.config.rules import data, faults, fit, layout, linear, logging, run_parts
from sagetrain.config.run_parts import parts, with_keys_of_stages
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
    tokens_given: bool = False,
) -> list[Finding]:
    """Return everything there is to say about a run before it starts, errors first.

    Args:
        vocab_size: vocabulary size of the tokenizer, when it is known.
        path: file that `cfg` was loaded from. Findings then name file and line.
        files: True to train here, where missing data files and packages are errors. False to plan for another machine,
            where missing files are warnings and missing packages are not mentioned.
        measured: measurements of an earlier run, for the guidance.
        others: further findings that also need their place.
        tokens_given: whether a function gives the training tokens, so that data.train names no files.
    """
    findings = [*run_parts.findings(cfg)]
    for part in parts(cfg):
        of_part = [
            *layout.launch(part, world_size),
            *fit(part, world_size, vocab_size),
            *linear.unreached(part),
            *guidance(part, measured),
            *data.findings(part, required=files, tokens_given=tokens_given),
            *faults.findings(part),
            *logging.findings(part, required=files),
        ]
        findings += [each for each in with_keys_of_stages(of_part, part) if each not in findings]
    return placed([*findings, *others], path, overrides)


def placed(findings: Iterable[Finding], path: str | Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Return findings with the places where their keys were given, errors first. Without a path they get no places."""
    if path is not None:
        findings = located(findings, path, overrides)
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def accepted(findings: list[Finding]) -> list[Finding]:
    """Return the findings of a run that is about to start. Raises ConfigError with all errors among them."""
    if errors := [str(finding) for finding in findings if finding.level == "error"]:
        raise ConfigError("\n".join(errors))
    return findings
