"""The configuration that a command is given: its place, and the check that it can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sagetrain.cli.exits import warn
from sagetrain.config.errors import ConfigError, Finding, at_start


def named(
    command: str, first: str | None, options: list[Path] | None, others: list[str] | None
) -> tuple[Path, list[str]]:
    """Return the configuration and the overrides from `CONFIG [KEY=VALUE]...` or from `--config CONFIG [KEY=VALUE]...`.
    Raises ConfigError if no configuration is named, or several by --config."""
    words = [*([first] if first is not None else []), *(others or [])]
    if options:
        if options[1:]:
            raise ConfigError(
                f"--config {' and '.join(map(str, options))}: name one configuration; overrides are KEY=VALUE"
            )
        return options[0], words
    from sagetrain.config.load import is_assignment

    if not words or not words[0] or is_assignment(words[0]):
        raise ConfigError(f"name a configuration: sagetrain {command} my.yaml; `sagetrain config` lists shipped ones")
    return Path(words[0]), words[1:]


def checked(config: Path, overrides: list[str], world_size: int, show: bool) -> tuple[Any, list[Finding]]:
    """Load and check a configuration. Raises ConfigError here, before any process group starts. With `show`, other
    findings are printed."""
    from sagetrain.config.check import accepted, check
    from sagetrain.config.load import load_config
    from sagetrain.data.remote_blocks import fetch_sources
    from sagetrain.data.tokenizer import known_vocab_size

    cfg = load_config(config, overrides)
    fetch_sources(cfg.data)
    found = check(cfg, world_size, vocab_size=known_vocab_size(cfg.data), path=config, overrides=overrides)
    findings = accepted(found)
    if show:
        for line in at_start(findings):
            warn(line)
    return cfg, findings
