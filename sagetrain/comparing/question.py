"""The question of a comparison: variants against a baseline, for every row of settings, over seeds. It is checked here,
before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sagetrain.config.arithmetic import checkpoint_tokens, may_be_low_bit
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import differences, flat, load_config, nested
from sagetrain.config.schema import NoiseAwareTokens, RunConfig
from sagetrain.data.remote_blocks import fetch_sources
from sagetrain.data.tokenizer import known_vocab_size

SHARED = (
    "model",
    "attention.qk_norm",
    "data",
    "tokens_per_step",
    "training.seed",
    "training.total_tokens",
    "training.drop_steps",
    "training.init_from",
    "training.init_moments",
    "evaluation",
    "logging.every_steps",  # A training loss is the mean of the steps that are reported.
)
"""Keys and sections that the runs of a pair have in common: initialization, samples, the steps at which weights change,
and what is measured."""
_FREE = ("data.num_workers", "data.micro_batch_size", "evaluation.every_tokens")
"""Keys inside of SHARED that may differ, because they change none of that."""
OWN = ("training.seed", "training.run_dir", "training.perturb", "checkpoint.keep_every_tokens")
"""Keys that are set for each run here, or may be."""
RECIPE = "fine"
"""The recipe of all runs of a comparison where attention.recipe is auto. Each run would time it otherwise."""
BRANCH = "--branch"
"""The key of Question.settings for the tokens at which pairs part."""


@dataclass(frozen=True)
class Setting:
    """A variant or a row: a name, and the keys that it sets."""

    name: str
    overrides: tuple[str, ...] = ()
    config: str = ""
    """The configuration file of a variant."""


@dataclass(frozen=True)
class Job:
    """One run. The first variant is the baseline. `again` marks a second run with another rounding."""

    row: str
    variant: str
    seed: int
    again: bool = False

    @property
    def folder(self) -> str:
        """The folder of the run, below the folder of all runs."""
        parts = [self.row, self.variant, f"seed-{self.seed}" + ("-again" if self.again else "")]
        return "/".join(part for part in parts if part)

    @property
    def setting(self) -> str:
        """The key of the run's configuration in Question.settings."""
        return f"{self.row}/{self.variant}"

    def __str__(self) -> str:
        words = [self.row, self.variant, f"seed {self.seed}", *(["again"] if self.again else [])]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Question:
    """Everything that determines which runs there are."""

    variants: tuple[Setting, ...]
    rows: tuple[Setting, ...] = (Setting(""),)
    overrides: tuple[str, ...] = ()
    """Overrides of all runs."""
    seeds: int = 1
    band: int = 0
    """Number of seeds for which the baseline is run a second time."""
    allow: tuple[str, ...] = ()
    """Keys or sections of SHARED that may differ nonetheless."""
    first_seed: int = 0
    branch: int = 0
    """If not 0, the other runs continue from the baseline's first checkpoint of at least this many tokens, which the
    baseline keeps."""

    @property
    def baseline(self) -> str:
        return self.variants[0].name

    def default_output(self) -> Path:
        """Return the baseline's run_dir with -compare at its end."""
        run_dir = self.config(Job(self.rows[0].name, self.baseline, 0)).training.run_dir
        return Path(f"{run_dir}-compare")

    def jobs(self) -> Iterator[Job]:
        """Yield all runs, seed after seed, so that a comparison that is stopped early has complete pairs."""
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            for row in self.rows:
                for variant in self.variants:
                    yield Job(row.name, variant.name, seed)
                    if variant.name == self.baseline and seed < self.first_seed + self.band:
                        yield Job(row.name, variant.name, seed, again=True)

    def command(self, job: Job, run_dir: Path | str) -> list[str]:
        """Return the arguments of a run's command: CONFIG [KEY=VALUE]..."""
        # Overrides are YAML, where " #" begins a comment.
        where = yaml.safe_dump(str(run_dir), default_style='"', width=math.inf).rstrip("\n")
        own = [f"training.seed={job.seed}", f"training.run_dir={where}", f"training.perturb={int(job.again)}"]
        if self.branch and job.variant == self.baseline:
            # Otherwise the baseline may delete the checkpoint that the others wait for before it is seen.
            kept = self.config(job).checkpoint.keep_every_tokens or self.branch
            # One of the two divides the other (_no_branch).
            own.append(f"checkpoint.keep_every_tokens={min(kept, self.branch)}")
        return [*self._given(job), *own]

    def _given(self, job: Job) -> list[str]:
        """Return the configuration file and the overrides that were asked for, without the run's own seed, folder and
        rounding, and with RECIPE in place of attention.recipe auto."""
        variant = next(variant for variant in self.variants if variant.name == job.variant)
        row = next(row for row in self.rows if row.name == job.row)
        words = [*self.overrides, *row.overrides, *variant.overrides]
        attention = load_config(variant.config, words).attention
        settled = [f"attention.recipe={RECIPE}"] * ((attention.backend, attention.recipe) == ("sage", "auto"))
        return [variant.config, *words, *settled]

    def config(self, job: Job) -> RunConfig:
        """Return the whole configuration of a run, as it was asked for."""
        path, *overrides = self._given(job)
        return load_config(path, overrides)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return every key of each `row/variant` by its dotted name, without the keys that are a run's own, and with
        the tokens at which pairs part."""
        jobs = [Job(row.name, variant.name, 0) for row in self.rows for variant in self.variants]
        trees = {job.setting: flat(self.config(job).model_dump(mode="json")) for job in jobs}
        more = {BRANCH: self.branch} if self.branch else {}
        return {name: {key: tree[key] for key in tree if key not in OWN} | more for name, tree in trees.items()}

    def parting(self, row: str) -> range:
        """Return the range of tokens that the baseline has seen at the checkpoint where pairs part. The checkpoint
        is saved by the step that reaches or passes the next multiple of checkpoint.every_tokens, and is not the last
        one."""
        total, every, step = self._saving(row)
        return range(self.branch, min(-(-self.branch // every) * every + step, total))

    def _saving(self, row: str) -> tuple[int, int, int]:
        """Return three numbers of the baseline: its total tokens, the tokens between two checkpoints, and the tokens of
        its largest step, which may pass such a multiple by nearly that much."""
        cfg = self.config(Job(row, self.baseline, 0))
        return cfg.training.total_tokens, checkpoint_tokens(cfg), max(cfg.tokens_per_step.named_tokens.values())

    def check(self) -> None:
        """Check that the runs can be compared and can start. Raises ConfigError that names all that prevents it."""
        problems, of_runs = [*self._unknown_allowed(), *self._no_branch()], dict[str, list[str]]()
        for row in self.rows:
            baseline = flat(self.config(Job(row.name, self.baseline, 0)).model_dump(mode="json"))
            for variant in self.variants:
                path, *overrides = self._given(Job(row.name, variant.name, 0))
                overrides += ["training.perturb=1"] * (self.band > 0 and variant.name == self.baseline)
                cfg = load_config(path, overrides)
                fetch_sources(cfg.data)
                findings = check(cfg, 1, vocab_size=known_vocab_size(cfg.data), path=path, overrides=overrides)
                wrong = [*(str(finding) for finding in findings if finding.level == "error"), *_timed(cfg)]
                if url := cfg.training.run_url:
                    wrong.append(
                        f"training.run_url {url}: the runs of a comparison keep their checkpoints in "
                        "folders of their own on a disk; leave it out (training.run_url=null)"
                    )
                if isinstance(cfg.tokens_per_step, NoiseAwareTokens) and not _within("tokens_per_step", self.allow):
                    wrong.append(
                        "tokens_per_step.schedule noise_aware: each run would decide its own steps by "
                        "what it measures, and the runs of a pair share theirs. Use constant, ramp or stages, or "
                        "accept the difference with --allow tokens_per_step"
                    )
                changed = differences(baseline, flat(cfg.model_dump(mode="json")))
                idle = {finding.key: finding for finding in findings if finding.rule == "no_effect"}
                if changed and changed.keys() <= idle.keys():
                    said = "; ".join(f"{idle[key].key} {idle[key].message}" for key in changed)
                    wrong.append(f"the same runs as {self.baseline}: {said}")
                for said in wrong:
                    of_runs.setdefault(said, []).append(variant.name)
                for key, (ours, theirs) in changed.items():
                    if _within(key, SHARED) and not _within(key, (*_FREE, *self.allow)):
                        problems.append(
                            f"{key}: {ours!r} in {self.baseline}, {theirs!r} in {variant.name}: the runs of a pair "
                            "share initialization, samples and steps. Give both the same"
                            + ("" if key in OWN else f", or accept the difference with --allow {key}")
                        )
        # A search may have 17 variants with the same mistake.
        problems += [f"{', '.join(dict.fromkeys(names))}: {said}" for said, names in of_runs.items()]
        if problems:
            raise ConfigError("\n  ".join(["these runs cannot be compared; nothing was started:", *problems]))

    def _unknown_allowed(self) -> Iterator[str]:
        for key in self.allow:
            if not any(_within(key, [shared]) or _within(shared, [key]) for shared in SHARED):
                yield f"--allow {key}: what may not differ is {', '.join(SHARED)}; everything else may"

    def _no_branch(self) -> Iterator[str]:
        """Yield the reasons why pairs cannot part where they should."""
        for row in self.rows if self.branch else ():
            total, every, step = self._saving(row.name)
            if self.branch > (last := (total - step) // every * every):
                yield (
                    f"{BRANCH} {self.branch:,}: the baseline saves every {every:,} of its {total:,} tokens "
                    f"(checkpoint.every_tokens), the last time before its end at {last:,}: part there or before"
                )
            kept = self.config(Job(row.name, self.baseline, 0)).checkpoint.keep_every_tokens
            if kept and kept < total and self.branch % kept and kept % self.branch:
                yield (
                    f"checkpoint.keep_every_tokens {kept:,}: the baseline keeps what {BRANCH} {self.branch:,} needs by "
                    "the same key: take a divisor or a multiple of that, or null"
                )


def with_new_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that an earlier version may have written with the keys that it did not have: its runs were as
    their defaults say. Settings that this version cannot read stay as they are."""
    given = {key: value for key, value in settings.items() if key != BRANCH}
    try:
        cfg = RunConfig.model_validate(nested({**given, "training.run_dir": "."}))
    except ValidationError:
        return dict(settings)
    now = flat(cfg.model_dump(mode="json"))
    return {**settings, **{key: now[key] for key in now if key not in settings and key not in OWN}}


def usable(name: str, where: str) -> str:
    """Return the name of a variant or row. Raises ConfigError if it cannot be the name of a folder."""
    if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
        raise ConfigError(f"{where}: the name {name!r} becomes that of a folder: use letters, digits and . _ - + =")
    return name


def _timed(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each setting that every run would decide for itself, by timing."""
    for key, value, name in (
        ("attention.backend", cfg.attention.backend, "sdpa"),
        ("linear.precision", cfg.linear.precision if may_be_low_bit(cfg) else "", "bf16"),
    ):
        if value == "auto":
            yield (
                f"{key} auto is timed when a run begins, and runs of one variant may not come to the same: name it "
                f"({key}={name}, say)"
            )


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
