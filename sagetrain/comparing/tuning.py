"""`sagetrain compare --tune`: the rounds of a search, each a comparison of its own, and the page about them."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sagetrain.comparing import runner
from sagetrain.comparing.command import PAGE, TABLES, Places, Say, compare
from sagetrain.comparing.halving import LEAST, Halving, shown
from sagetrain.comparing.question import Question, Setting
from sagetrain.comparing.results import Results
from sagetrain.comparing.run_records import FAILED, FINISHED, Record
from sagetrain.comparing.tuning_page import PLOT, Round, draw, page
from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many
from sagetrain.config.load import flat, load_config
from sagetrain.config.schema import ConstantTokens, LrScheduleConfig, TokensPerStepConfig
from sagetrain.data.token_file import write_atomic

SEARCH = "tune.json"
_RANGE = re.compile(r"([\w.]+)=([^:]+):([^:]+)")


@dataclass(frozen=True)
class TuneRequest:
    """A configuration, and the key whose best value is searched."""

    config: str
    """A configuration file, or the name of a shipped one."""
    range: str
    """The text KEY=LOW:HIGH."""
    budget: int
    """The tokens of all runs together."""
    overrides: Sequence[str] = ()
    seeds: int = 3
    allow: Sequence[str] = ()

    def search(self) -> Halving:
        """Return the search. Raises ConfigError if the range, the budget or the configuration does not allow it."""
        match = _RANGE.fullmatch(self.range)
        try:
            key, low, high = match[1], float(match[2]), float(match[3])  # type: ignore[index]
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(
                f"--tune {self.range!r}: is written KEY=LOW:HIGH, for example optimizer.lr=1e-4:1e-2"
            ) from None
        cfg = load_config(self.config, [*self.overrides, _setting(key, high)])
        value = flat(cfg.model_dump(mode="json")).get(key)
        if not isinstance(value, (int, float)):
            raise ConfigError(f"--tune {key}: is no number that can be searched; name a key of one number")
        whole, total = isinstance(value, int), cfg.training.total_tokens
        tokens = max(cfg.tokens_per_step.named_tokens.values())
        found = Halving(key, low, high, whole, total, tokens, self.seeds, self.budget)
        found.check()
        if said := [*_not_scaled(found, cfg.tokens_per_step, cfg.lr_schedule)]:
            raise ConfigError("\n  ".join([f"--tune {key}: nothing was started:", *said]))
        return found

    def question(self, search: Halving, number: int, values: Sequence[float]) -> Question:
        """Return the comparison of round `number`: a variant for each value, with a whole schedule of its own."""
        key, name = search.key, search.key.rpartition(".")[2]
        variants = [Setting(_setting(name, value), (_setting(key, value),), self.config) for value in values]
        overrides = (*self.overrides, f"training.total_tokens={search.tokens(number)}")
        seed = load_config(self.config, self.overrides).training.seed
        return Question(tuple(variants), (Setting(""),), overrides, search.seeds_of(number), 0, tuple(self.allow), seed)

    def default_output(self, key: str) -> Path:
        """Return the run_dir of the configuration with -tune and the key at its end."""
        return Path(f"{load_config(self.config, self.overrides).training.run_dir}-tune-{key}")


def _not_scaled(search: Halving, steps: TokensPerStepConfig, schedule: LrScheduleConfig) -> Iterator[str]:
    """Yield a message for each setting by which a shorter run is not the same run on a smaller scale."""
    if search.key == "training.total_tokens":
        yield f"{search.key}: is what rounds differ in; tune another key"
    if search.rounds == 1:
        return
    why = "does not shrink with the runs of early rounds"
    or_pay = f", or --budget {search.grid(LEAST):,}, which pays for {LEAST} values at full length"
    if not isinstance(steps, ConstantTokens):
        yield f"tokens_per_step.schedule = {steps.schedule}: {why}; use constant{or_pay}"
    for share, tokens in (("warmup", schedule.warmup_tokens), ("decay", schedule.decay_tokens)):
        if tokens:
            yield f"lr_schedule.{share}_tokens = {tokens}: {why}; use lr_schedule.{share}, a share of the run{or_pay}"


def _setting(key: str, value: float) -> str:
    return f"{key}={shown(value)}"


def tune(
    request: TuneRequest,
    where: Places,
    say: Say,
    *,
    command: str,
    margin: float,
    time_limit: float | None = None,
    start: runner.Start = runner.start_process,
) -> list[Results]:
    """Run the rounds of a search as far as signals and time allow, and write the page about what has ended. Raises
    ConfigError if the search cannot be made, or the folder holds another one.

    Args:
        where: the folder of the search and the devices. Each round is a comparison in a folder of its own there.
        command: as in `compare`, and so are `time_limit` and `start`.
        margin: the difference in loss that does not matter.

    Returns:
        The results of the rounds that began.
    """
    search, begin = request.search(), time.monotonic()
    values, found, rounds = search.values(), list[Results](), list[Round]()
    # A folder is not taken by a search that cannot begin.
    request.question(search, 0, values).check()
    _keep(search, request, where.output)
    say(f"{search.key}: {many(len(values), 'value')}, {search.planned:,} of {search.budget:,} tokens")
    for number in itertools.count():
        left = None if time_limit is None else time_limit - (time.monotonic() - begin)
        if left is not None and left <= 0:
            say("stopped by --time-limit; the same command continues")
            break
        name = f"round-{number + 1}"
        say(f"{name}: {many(len(values), 'value')}, {search.tokens(number):,} tokens each")
        question = request.question(search, number, values)
        place = replace(where, output=where.output / name, run_dirs=where.run_dirs / name)
        results = compare(question, place, say, command=command, time_limit=left, start=start)
        found.append(results)
        jobs = [*question.jobs()]
        ended = {job: results.runs[job] for job in jobs if job in results.runs and results.runs[job].ended}
        if len(ended) < len(jobs):
            break
        names = dict(zip((variant.name for variant in question.variants), values, strict=True))
        losses = {value: [_loss(run) for job, run in ended.items() if names[job.variant] == value] for value in values}
        spent = sum(run.tokens for run in ended.values())
        if number < search.rounds:
            rounds.append(Round(search.tokens(number), losses, spent))
        else:
            rounds[-1] = Round(search.tokens(number), {**rounds[-1].losses, **losses}, rounds[-1].spent + spent)
        means = rounds[-1].means
        if not any(map(math.isfinite, means.values())):
            raise ConfigError(f"--tune {search}: every run of {name} diverged; name another range")
        values = search.next_round(number, means, sum(each.spent for each in rounds))
        if not values:
            break
    if rounds:
        evaluated = any(run.valid_end is not None for run in found[0].runs.values())
        measured = "validation loss" if evaluated else "training loss over the last 5 %"
        text, tree = page(search, rounds, margin, command, measured)
        write_atomic(where.output / PAGE, text.encode(errors="backslashreplace"))
        write_atomic(where.output / TABLES, (json.dumps(tree, indent=1) + "\n").encode())
        draw(search, rounds, measured, where.output / PLOT)
        say(tree["verdict"])
        say(f"{where.output / PAGE}")
    return found


def failed(found: Sequence[Results]) -> int:
    """Return the number of runs that ended for another reason than their losses."""
    return sum(run.status == FAILED for results in found for run in results.runs.values())


def _keep(search: Halving, request: TuneRequest, output: Path) -> None:
    """Write what is searched, or check that the folder holds the same search."""
    asked = {**asdict(search), "config": request.config, "overrides": [*request.overrides]}
    path = output / SEARCH
    if path.is_file():
        known: Mapping[str, object] = json.loads(path.read_text())
        if changed := [
            f"{key}: {known.get(key)!r} there, {asked[key]!r} now" for key in asked if known.get(key) != asked[key]
        ]:
            lines = "\n  ".join([f"{path} is of another search:", *changed])
            raise ConfigError(f"{lines}\n  repeat that command to continue it, or use another {spelled('output')}")
        return
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(asked, indent=1) + "\n").encode())


def _loss(run: Record) -> float:
    """Return the loss that a run is judged by: the validation loss, or the training loss where nothing was held out."""
    loss = run.valid_end if run.valid_end is not None else run.train_end
    return loss if run.status == FINISHED and loss is not None else math.inf
