"""Write overrides that Python gives as the command line has them: KEY=VALUE, with values in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from sagetrain.config import yaml_nodes
from sagetrain.config.errors import ConfigError

ConfigChanges = Mapping[str, object] | Sequence[str]
"""Overrides of a configuration: values by dotted key, as in {"optimizer.lr": 3e-4}, or texts of the command line, as in
["optimizer.lr=3e-4"]."""


def assignments(overrides: ConfigChanges) -> list[str]:
    """Return overrides in the form of the command line, as "key=value"."""
    if isinstance(overrides, str) or not isinstance(overrides, Mapping | Sequence):
        raise ConfigError(
            f"overrides {overrides!r}: give a mapping of dotted keys ({{'optimizer.lr': 3e-4}}) or a list of texts "
            "(['optimizer.lr=3e-4'])"
        )
    if not isinstance(overrides, Mapping):
        return [str(each) for each in overrides]
    return [f"{key}={_yaml(value)}" for key, value in overrides.items()]


def _yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    try:
        text = yaml_nodes.dump(value, flow=True)
    except (yaml.YAMLError, ValueError) as error:
        fix = "give numbers, texts, lists or mappings"
        raise ConfigError(f"{value!r} is no value of a configuration: {fix}") from error
    return text.removesuffix("\n").removesuffix("\n...")
