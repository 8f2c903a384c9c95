"""The record of a run: a line of losses.jsonl, small enough to be carried from machine to machine."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sagetrain.comparing.question import Job
from sagetrain.comparing.statistics import end_of, thinned
from sagetrain.config.errors import ConfigError
from sagetrain.data.token_file import write_atomic
from sagetrain.report.read import has_loss
from sagetrain.storage.local import read_rows

FINISHED, DIVERGED, FAILED, STOPPED = "finished", "diverged", "failed", "stopped"
_RANKS = (STOPPED, FAILED, DIVERGED, FINISHED)
_NOISE_SCALE, _BIAS = "noise/all/scale_tokens", "quant_noise/all/bias_to_gradient"


@dataclass(frozen=True)
class Record:
    """A run as far as it came. Losses are in nats per token."""

    row: str
    variant: str
    seed: int
    again: bool
    status: str
    """finished; diverged (a step that went wrong ended it, or its last loss is not finite); failed (something
    else did); stopped (not ended yet)."""
    tokens: int = 0
    total_tokens: int = 0
    tokens_per_step: int = 0
    """Tokens per step at the end."""
    train_end: float | None = None
    """Mean training loss over the last 5 % of the tokens."""
    valid_end: float | None = None
    """Last validation loss."""
    tokens_per_second: float | None = None
    """Median of the throughput."""
    noise_scale: float | None = None
    """Gradient noise scale in tokens: the median over the second half of the run, where it is measured."""
    events: dict[str, int] = field(default_factory=dict)
    """Number of events of the run by kind, such as spikes."""
    train: list[list[float]] = field(default_factory=list)
    """[tokens seen, mean loss] of every 10 reported steps."""
    valid: list[list[float]] = field(default_factory=list)
    """[tokens seen, validation loss] of every evaluation."""
    said: str = ""
    """The end of the log of a run that failed or diverged."""
    bias_to_gradient: float | None = None
    """Bias that quantization puts into the gradient, divided by the gradient, both squared: the mean over the run's
    probes."""

    def __post_init__(self) -> None:
        ends = [loss for loss in (self.train_end, self.valid_end) if loss is not None]
        # Such a run may come to its end, where spikes are skipped, for example, or an evaluation overflows.
        if self.status == FINISHED and not all(map(math.isfinite, ends)):
            object.__setattr__(self, "status", DIVERGED)

    @property
    def job(self) -> Job:
        return Job(self.row, self.variant, self.seed, self.again)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be run."""
        return self.status in (FINISHED, DIVERGED)


def read_run(job: Job, run_dir: Path, total_tokens: int, evaluated: bool, every_steps: int = 1) -> Record:
    """Read the present state of a run from its folder. The record's status is finished or stopped.

    Args:
        total_tokens: tokens of the whole run.
        evaluated: whether the run has held-out data.
        every_steps: steps between two reported steps. Other steps are reported when a run is saved or stopped; they are
            left out, because they would be in the mean of one run of a pair alone.
    """
    rows, tokens = read_rows(run_dir / "metrics.jsonl"), 0
    points, steps, valid, rates, scales, biases = [], [], [], [], [], []
    for row in rows:
        tokens = row["tokens"]
        if has_loss(row) and (row["step"] % every_steps == 0 or tokens >= total_tokens):
            points.append((tokens, row["train/tokens_per_step"], row["train/loss"]))
            steps.append((row["step"], tokens, row["train/loss"]))
            rates.append(row["perf/tokens_per_second"])
        if "valid/loss" in row:
            valid.append([tokens, row["valid/loss"]])
        if tokens >= total_tokens / 2 and math.isfinite(scale := row.get(_NOISE_SCALE, math.nan)):
            scales.append(scale)
        if math.isfinite(bias := row.get(_BIAS, math.nan)):
            biases.append(bias)
    done = tokens >= total_tokens and (not evaluated or (bool(valid) and valid[-1][0] >= total_tokens))
    return Record(
        job.row,
        job.variant,
        job.seed,
        job.again,
        FINISHED if done else STOPPED,
        tokens,
        total_tokens,
        points[-1][1] if points else 0,
        round(end_of(points), 6) if points else None,
        round(valid[-1][1], 6) if valid else None,
        round(statistics.median(rates)) if rates else None,
        round(statistics.median(scales)) if scales else None,
        dict(Counter(row["kind"] for row in read_rows(run_dir / "events.jsonl"))),
        [[seen, round(loss, 4)] for seen, loss in thinned(steps)],
        [[seen, round(loss, 6)] for seen, loss in valid],
        bias_to_gradient=float(f"{statistics.mean(biases):.3g}") if biases else None,
    )


def went_wrong(run_dir: Path) -> bool:
    """Whether the last step of a run went wrong: its events end with a step behind all steps that it reported."""
    reported = max((row["step"] for row in read_rows(run_dir / "metrics.jsonl") if "train/loss" in row), default=0)
    ended = (row["step"] for row in read_rows(run_dir / "events.jsonl") if row.get("action") == "stop")
    return max(ended, default=0) > reported


def load(path: Path) -> list[Record]:
    """Read the lines of a losses.jsonl. Return none if the file does not exist. Raises ConfigError for a line that
    `save` did not write."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return [Record(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not what sagetrain compare writes ({error}); restore or remove it") from error


def save(path: Path, records: Iterable[Record]) -> None:
    """Write one line per run."""
    write_atomic(path, "".join(json.dumps(asdict(record)) + "\n" for record in records).encode())


def merged(records: Iterable[Record]) -> dict[Job, Record]:
    """Return one record for each run. If there are several, the one that ended best is kept, then the one that came
    furthest."""
    best: dict[Job, Record] = {}
    for record in records:
        best[record.job] = max(best.get(record.job, record), record, key=_standing)
    return best


def _standing(record: Record) -> tuple[int, int]:
    return _RANKS.index(record.status), record.tokens


def curve(record: Record) -> Sequence[tuple[int, float]]:
    """Return the training losses of a run over the tokens seen."""
    return [(int(tokens), loss) for tokens, loss in record.train]
