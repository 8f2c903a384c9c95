"""The request of `sagetrain compare`, from a command line or a call in Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sagetrain.comparing.command import Places, places
from sagetrain.comparing.question import Question, Setting, usable
from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import load_config


@dataclass(frozen=True)
class CompareRequest:
    """The configurations of a comparison, and where its runs go."""

    configs: Sequence[str]
    """Configuration files or names of shipped ones. The first one is the baseline."""
    variants: Sequence[str] = ()
    """Texts `NAME: KEY=VALUE ...`: the first file with these overrides."""
    rows: Sequence[str] = ()
    """Texts of the same form: settings that all variants get."""
    overrides: Sequence[str] = ()
    """Overrides of all runs."""
    baseline: str | None = None
    """The name of the first variant. Default: the name of its file."""
    seeds: int = 3
    band: int = 0
    """The number of seeds for which the baseline is run a second time."""
    allow: Sequence[str] = ()
    """Keys or sections that may differ nonetheless."""
    branch: int = 0
    """The tokens at which the other runs leave the baseline; 0: they begin by themselves."""
    output: Path | None = None
    """The folder of the results. Default: training.run_dir-compare."""
    run_dirs: Path | None = None
    """The folder of the runs. Default: `runs` in the output folder."""
    per_gpu: int = 1
    """The number of runs that share a GPU at the same time."""

    def question(self) -> Question:
        """Return the runs that are compared. Raises ConfigError if a name or a text cannot be used, or if there is
        nothing to compare."""
        if not self.configs:
            raise ConfigError("name a configuration: sagetrain compare A.yaml B.yaml")
        first, *others = self.configs
        named = [
            Setting(usable(self.baseline or Path(first).stem, "--baseline"), config=first),
            *(Setting(usable(Path(path).stem, path), config=path) for path in others),
            *(named_overrides(text, spelled("variants"), first) for text in self.variants),
        ]
        if len(named) == 1 and not self.band:
            raise ConfigError(
                f"{first} alone: name another configuration to compare it with, or {spelled('variants')} 'NAME: "
                f"KEY=VALUE'; or {spelled('band')}, to run it against itself"
            )
        settings = tuple(named_overrides(text, spelled("rows")) for text in self.rows) or (Setting(""),)
        for kind in (named, settings):
            if twice := [name for name, count in Counter(setting.name for setting in kind).items() if count > 1]:
                raise ConfigError(
                    f"{twice[0]!r} names two variants or rows: give each a name of its own ({spelled('variants')}, "
                    f"{spelled('rows')})"
                )
        if not 0 <= self.band <= self.seeds:
            raise ConfigError(
                f"{spelled('band')} {self.band}: the baseline is run again for so many of the {spelled('seeds')} "
                f"{self.seeds}, at most all"
            )
        overrides = tuple(self.overrides)
        seed = load_config(first, [*overrides, *settings[0].overrides]).training.seed
        return Question(tuple(named), settings, overrides, self.seeds, self.band, tuple(self.allow), seed, self.branch)

    def places(self, question: Question) -> Places:
        """Return the folders and the devices of the runs."""
        return places(self.output or question.default_output(), self.run_dirs, self.per_gpu)


def named_overrides(text: str, option: str, config: str = "") -> Setting:
    """Parse `NAME: KEY=VALUE KEY=VALUE`, as written on a command line. A value may hold spaces."""
    name, colon, rest = text.partition(":")
    words = re.split(r"\s+(?=[\w.]+=)", rest.strip())
    if not (colon and name and all(re.match(r"[\w.]+=", word) for word in words)):
        raise ConfigError(f"{option} {text!r}: is written 'NAME: KEY=VALUE', for example "
                          "'paper: attention.backend=sage attention.recipe=paper'")  # fmt: skip
    return Setting(usable(name.strip(), option), tuple(words), config)
