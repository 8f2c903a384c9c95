"""The folders of comparisons: compare.json holds the question, and losses.jsonl a line for each run."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sagetrain.comparing import run_records
from sagetrain.comparing.question import Job, Question, Setting, with_new_keys
from sagetrain.comparing.run_records import Record
from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import differences
from sagetrain.data.token_file import write_atomic

QUESTION, LOSSES = "compare.json", "losses.jsonl"


@dataclass(frozen=True)
class Call:
    """One call of the command."""

    date: str
    """The time when it began, YYYY-MM-DD HH:MM UTC."""
    command: str
    devices: str
    """The devices as text, such as `2 x NVIDIA H200`."""
    versions: str
    seconds: float = 0.0
    gpus: int = 0


@dataclass
class Results:
    """The question and the results of one folder, or of several."""

    question: Question
    settings: dict[str, dict[str, Any]]
    """The result of Question.settings."""
    parameters: int
    data_tokens: int
    """Number of tokens in data.train of the baseline."""
    calls: list[Call]
    runs: dict[Job, Record] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Setting, ...]:
        return self.question.rows

    @property
    def baseline(self) -> str:
        return self.question.baseline

    def of_baseline(self, row: Setting) -> dict[str, Any]:
        """Return the settings of the baseline in a row."""
        return self.settings[Job(row.name, self.baseline, 0).setting]

    def failed(self, jobs: Container[Job]) -> list[Record]:
        """Return those of these runs that ended for another reason than their losses."""
        return [run for job, run in self.runs.items() if job in jobs and run.status == run_records.FAILED]

    def of(self, row: str, variant: str, again: bool = False) -> dict[int, Record]:
        """Return the runs of a variant in a row, by seed."""
        wanted = row, variant, again
        found = (job for job in self.runs if (job.row, job.variant, job.again) == wanted)
        return {job.seed: self.runs[job] for job in sorted(found, key=lambda job: job.seed)}

    def save(self, folder: Path) -> None:
        """Write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        tree = {
            "question": asdict(self.question),
            "settings": self.settings,
            "parameters": self.parameters,
            "data_tokens": self.data_tokens,
            "calls": [asdict(call) for call in self.calls],
        }
        write_atomic(folder / QUESTION, (json.dumps(tree, indent=1) + "\n").encode())
        order = list(self.question.jobs())
        known = [job for job in order if job in self.runs] + [job for job in self.runs if job not in order]
        run_records.save(folder / LOSSES, (self.runs[job] for job in known))


def load(folder: Path) -> Results:
    """Read the results in a folder. Raises ConfigError if it holds nothing that `save` wrote."""
    path = folder / QUESTION
    try:
        tree = json.loads(path.read_text())
        question = TypeAdapter(Question).validate_python(tree["question"])
        calls = [Call(**call) for call in tree["calls"]]
        settings = {name: with_new_keys(each) for name, each in tree["settings"].items()}
        result = Results(question, settings, tree["parameters"], tree["data_tokens"], calls)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder}: holds no {QUESTION}: name folders that sagetrain compare has written") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not what sagetrain compare writes ({error!r}); restore or remove it") from error
    result.runs = run_records.merged(run_records.load(folder / LOSSES))
    return result


def with_row(found: Results, name: str) -> Results:
    """Return the results with another name for their only row. Raises ConfigError if there are several rows."""
    if len(found.rows) > 1:
        names = ", ".join(row.name for row in found.rows)
        raise ConfigError(f"{name}=FOLDER: it has the rows {names}: one row gets a name; give the folder alone")
    return replace(
        found,
        question=replace(found.question, rows=(replace(found.rows[0], name=name),)),
        settings={f"{name}/{key.partition('/')[2]}": tree for key, tree in found.settings.items()},
        runs=run_records.merged(replace(run, row=name) for run in found.runs.values()),
    )


def together(parts: Sequence[tuple[str, Results]]) -> Results:
    """Merge results, each with the place that it comes from, into one with the rows, variants, seeds and calls of all.
    If a run is in several, the one that came furthest is kept. Raises ConfigError if baselines have different names, or
    a variant or row of one name has different settings."""
    (where, first), *others = parts
    result = replace(first, settings=dict(first.settings), calls=list(first.calls))
    variants, rows = ({s.name: s for s in settings} for settings in (first.question.variants, first.rows))
    for place, other in others:
        if other.baseline != first.baseline:
            raise ConfigError(
                f"{where} compares with {first.baseline}, {place} with {other.baseline}: not one question; take "
                f"--baseline {other.baseline}, or use another {spelled('output')} (with --report-only, leave one out)"
            )
        for name, settings in other.settings.items():
            known = result.settings.setdefault(name, settings)
            if changed := differences(known, settings):
                lines = [f"{key}: {a!r} and {b!r}" for key, (a, b) in changed.items()]
                raise ConfigError(
                    "\n  ".join([f"{where} and {place} have different settings for {name.strip('/')}:", *lines])
                    + f"\n  give what differs another name ({spelled('variants')}, {spelled('rows')}; with "
                    f"--report-only NAME=FOLDER names a folder's row), or use another {spelled('output')}"
                )
        for known_settings, more in ((variants, other.question.variants), (rows, other.rows)):
            for setting in more:
                known_settings.setdefault(setting.name, setting)
        calls = [call for call in other.calls if call not in result.calls]
        result.calls = sorted([*result.calls, *calls], key=lambda call: call.date)
    result.question = replace(first.question, variants=tuple(variants.values()), rows=tuple(rows.values()))
    result.runs = run_records.merged(run for _, part in parts for run in part.runs.values())
    return result
