"""The command `sagetrain compare`: run what is missing, record the results, write the page."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from sagetrain import __version__
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import InitFromRecord
from sagetrain.cluster.run_folder import is_taken, lock
from sagetrain.comparing import results, run_records, runner
from sagetrain.comparing.analysis import Comparison, curves, tables
from sagetrain.comparing.branch import Branches
from sagetrain.comparing.comparison_page import page
from sagetrain.comparing.plot import plot_gaps
from sagetrain.comparing.question import BRANCH, OWN, Job, Question, usable
from sagetrain.comparing.results import Call, Results
from sagetrain.comparing.run_records import DIVERGED, FAILED, FINISHED, STOPPED, Record
from sagetrain.config.arguments import spelled
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import TRAINING_EXIT_CODE, ConfigError, many
from sagetrain.config.load import differences, flat, is_assignment, load_config
from sagetrain.config.schema import DataConfig, ModelConfig
from sagetrain.costs.accounting import num_parameters, total_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.token_file import TokenFile, write_atomic
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.parallel.host import nvidia_smi
from sagetrain.storage.local import read_rows
from sagetrain.storage.url_path import location
from sagetrain.training import init_from
from sagetrain.training.out_of_memory import OUT_OF_MEMORY

PAGE, PLOT, TABLES = "README.md", "gap.png", "results.json"
_SAY_SECONDS = 30.0
_BESIDE = 3 * 2**29
"""Bytes of a GPU that a run takes beside the planned memory: CUDA's context and fragmentation. There is no NCCL,
because a run is one rank; planning reserves 3 GiB with it. Runs with 43M parameters took 1.0 to 1.6 GiB on an H100,
2026-11-26."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Places:
    """The folders and the devices of the runs."""

    output: Path
    run_dirs: Path
    gpus: tuple[str, ...]
    """Numbers or names of the GPUs, as in CUDA_VISIBLE_DEVICES."""
    per_gpu: int
    devices: str
    memory: int = 0
    """Bytes of a GPU. 0: not known."""

    def log(self, job: Job) -> Path:
        """Return the path of a run's log, beside the run's folder."""
        return self.run_dirs / f"{job.folder}.log"


def places(output: Path, run_dirs: Path | None, per_gpu: int) -> Places:
    """Find the GPUs of this machine that CUDA_VISIBLE_DEVICES allows, or else its cores."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # CUDA hides all GPUs from the first name on that it does not know.
    gpus = tuple(named[:count] or map(str, range(count)))
    name, memory = _gpu() if gpus else ("", 0)
    devices = f"{len(gpus)} x {name}" if gpus else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return Places(output, run_dirs or output / "runs", gpus, per_gpu, f"{devices}, {many(per_gpu, 'run')} at a time"
                  + (" on each" if gpus else ""), memory)  # fmt: skip


def _gpu() -> tuple[str, int]:
    """Return the name and the bytes of the first GPU, by nvidia-smi. torch would use half a GB of the GPU for the
    answer."""
    lines = nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    name, _, mib = (lines or [""])[0].rpartition(",")
    return name.strip() or "GPU", int(mib) * 2**20 if mib.strip().isdigit() else 0


def compare(
    question: Question,
    where: Places,
    say: Say,
    *,
    command: str,
    time_limit: float | None = None,
    start: runner.Start = runner.start_process,
) -> Results:
    """Run every job that has not ended, as far as signals and time allow. Raises ConfigError if the question cannot be
    asked, or the folder holds another one.

    Args:
        command: the command as it was typed, for the page.
        time_limit: seconds after which the runs save and stop.
        start: function that starts the process of a run (see runner).

    Returns:
        Everything that is in the folder afterwards.
    """
    begin, stop = time.monotonic(), runner.Stop(time_limit)
    question.check()
    versions = f"sagetrain {__version__}, torch {torch.__version__}"
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    call = Call(now, command, where.devices, versions, gpus=len(where.gpus))
    held, error = lock(where.output)
    with held:
        if is_taken(error):
            raise ConfigError(
                f"{where.output} is in use by another comparison; wait for it, or use another {spelled('output')}"
            )
        found = _compared(question, where, say, call, stop, start)
        place = next(number for number, each in enumerate(found.calls) if each is call)
        found.calls[place] = replace(call, seconds=round(time.monotonic() - begin, 1))
        found.save(where.output)
    return found


def _compared(
    question: Question, where: Places, say: Say, call: Call, stop: runner.Stop, start: runner.Start
) -> Results:
    found = _results(question, call)
    if (where.output / results.QUESTION).exists():
        before = results.load(where.output)
        found = results.together([("this command", found), (str(where.output), before)])
    elif (where.output / results.LOSSES).exists():
        raise ConfigError(
            f"{where.output / results.LOSSES} holds runs, and no {results.QUESTION} beside it says of what: restore "
            f"that, move this away (runs whose folders are left are read from them), or use another {spelled('output')}"
        )
    jobs = list(question.jobs())
    for job in jobs:
        _refuse_others(found, job, where.run_dirs / job.folder)
        _reread(found, job, where.run_dirs / job.folder)

    def words(job: Job) -> list[str]:
        _refuse_other_start(found, job, where.run_dirs)
        return question.command(job, where.run_dirs / job.folder)

    missing = [job for job in jobs if job not in found.runs or not found.runs[job].ended]
    branches = Branches(question, where.run_dirs)
    branches.check(missing, [job for job, run in found.runs.items() if run.status == FINISHED])
    found.save(where.output)
    say(f"{many(len(jobs), 'run')}, {len(missing)} to go, {where.devices}: {where.output}")
    for text in _too_large(question, missing, where):
        say(text)

    def ended(job: Job, code: int | None) -> None:
        found.runs[job] = _ended(found, job, code, where)
        found.save(where.output)
        say(_sentence(found.runs[job], where.log(job)))

    def crowded(job: Job, others: int) -> bool:
        if OUT_OF_MEMORY not in runner.end_of_log(where.log(job), lines=2):
            return False
        beside = "one other run" if others == 1 else f"{others} other runs"
        say(f"{job}: out of GPU memory beside {beside}; it goes on later, and its GPU takes one run fewer from now on")
        return True

    with stop:
        runner.Runner(
            runner.slots(where.gpus, where.per_gpu, os.cpu_count() or 1),
            words,
            where.log,
            ended,
            _Progress(found, jobs, where.run_dirs, stop, say),
            start,
            branches.ready,
            crowded,
        ).run(missing, stop)
    if stop.why:
        say(f"stopped by {stop.why}; the same command continues")
    for job in missing if not stop.why else ():
        if job not in found.runs:
            say(branches.why_not(job))
    return found


def _results(question: Question, call: Call) -> Results:
    cfg = question.config(Job(question.rows[0].name, question.baseline, 0))
    vocab = _vocab_size(cfg.model, cfg.data)
    tokens = sum(TokenFile(path).num_tokens for source in cfg.data.train for path in source.files)
    size = num_parameters(cfg.model, cfg.attention, vocab)
    return Results(question, question.settings(), size, tokens, [call])


def _vocab_size(model: ModelConfig, data: DataConfig) -> int:
    return padded_vocab_size(model.vocab_size or Tokenizer.load(data.tokenizer_path).vocab_size)


def _too_large(question: Question, missing: Sequence[Job], where: Places) -> Iterator[str]:
    """Yield a message for each setting of which fewer runs fit into a GPU at a time than were asked for."""
    for job in {job.setting: job for job in missing}.values() if where.memory else ():
        cfg = question.config(job)
        needed = total_bytes(memory_per_rank(cfg, 1, _vocab_size(cfg.model, cfg.data))) + _BESIDE
        fit = max(1, where.memory // needed)
        if fit < where.per_gpu:
            yield (
                f"{job.variant}: a run takes {needed / 2**30:.1f} GiB of {where.memory / 2**30:.1f}, as planned: "
                f"{fit} at a time fit into a GPU, not {where.per_gpu}; those that find none left go on later"
            )


def _refuse_others(found: Results, job: Job, run_dir: Path) -> None:
    """Check that a run folder holds no run with other settings. Raises ConfigError if it does."""
    if not (run_dir / "config.yaml").exists():
        return
    tree = flat(load_config(run_dir / "config.yaml").model_dump(mode="json"))
    there = {key: tree[key] for key in tree if key not in OWN}
    asked = {key: value for key, value in found.settings[job.setting].items() if key != BRANCH}
    if changed := differences(asked, there):
        lines = [f"{key}: {theirs!r} there, {ours!r} now" for key, (ours, theirs) in changed.items()]
        what = "\n  ".join([f"{run_dir} holds a run with other settings:", *lines])
        raise ConfigError(f"{what}\n  remove it, or use another {spelled('output')} (--run-dirs)")


def _refuse_other_start(found: Results, job: Job, run_dirs: Path) -> None:
    """Check that a run would begin with the same weights as the other runs of its row. training.init_from may name a
    run that has gone on since they began. Raises ConfigError if the weights differ."""
    start = found.settings[job.setting]["training.init_from"]
    if not start or on_disk.newest(run_dirs / job.folder / "checkpoints"):
        return
    now = init_from.named(location(start))
    for other in found.question.jobs():
        path = run_dirs / other.folder / init_from.RECORD
        same = found.settings[other.setting]["training.init_from"] == start
        if other == job or other.row != job.row or not same or not path.is_file():
            continue
        began = InitFromRecord.from_json(json.loads(path.read_text()), path)
        if now and not init_from.is_recorded(now, began):
            raise ConfigError(
                f"{job} would begin with {now}, and {other} began with {began.checkpoint}: training.init_from "
                f"{start} has gone on since. Name a checkpoint there, and begin again in another {spelled('output')}"
            )


def _reread(found: Results, job: Job, run_dir: Path) -> None:
    """Read the records of a run folder that an earlier call wrote."""
    if (run_dir / "metrics.jsonl").exists():
        known = [found.runs[job]] if job in found.runs else []
        found.runs |= run_records.merged([*known, _read(found, job, run_dir)])


def _read(found: Results, job: Job, run_dir: Path) -> Record:
    settings = found.settings[job.setting]
    total, every = settings["training.total_tokens"], settings["logging.every_steps"]
    return run_records.read_run(job, run_dir, total, bool(settings["data.valid"]), every)


def _ended(found: Results, job: Job, code: int | None, where: Places) -> Record:
    """Return the record of a run that ended with an exit code. None as the code means that the run was asked to
    stop."""
    run_dir = where.run_dirs / job.folder
    record = _read(found, job, run_dir)
    if not code or record.status == FINISHED:
        return record
    status = DIVERGED if code == TRAINING_EXIT_CODE and run_records.went_wrong(run_dir) else FAILED
    return replace(record, status=status, said=runner.end_of_log(where.log(job)))


def _sentence(record: Record, log: Path) -> str:
    if record.status in (FAILED, DIVERGED):
        lines = "\n".join(f"    {line}" for line in record.said.splitlines())
        return f"{record.job}: {record.status} after {record.tokens:,} tokens; {log} ends with\n{lines}"
    losses = (("training", record.train_end), ("validation", record.valid_end))
    said = ", ".join(f"{kind} loss {loss:.4f}" for kind, loss in losses if loss is not None)
    seen = f"at {record.tokens:,} of {record.total_tokens:,} tokens" if record.status == STOPPED else ""
    return f"{record.job}: " + " ".join(part for part in (record.status, seen, said) if part)


class _Progress:
    """A progress report: one line now and then, and a message when the runs are stopped."""

    def __init__(self, found: Results, jobs: Sequence[Job], run_dirs: Path, stop: runner.Stop, say: Say):
        self._found, self._jobs, self._run_dirs, self._say = found, jobs, run_dirs, say
        self._next, self._stop, self._told = time.monotonic() + _SAY_SECONDS, stop, False

    def __call__(self, running: Sequence[Job]) -> None:
        if self._stop.why and running and not self._told:
            self._told = True
            self._say(
                f"{self._stop.why}: {many(len(running), 'run')} to save and stop; a second signal ends them at once"
            )
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAY_SECONDS
        ended = sum(job in self._found.runs and self._found.runs[job].ended for job in self._jobs)
        self._say(" | ".join([f"{ended} of {len(self._jobs)} runs ended", *map(self._far, running)]))

    def _far(self, job: Job) -> str:
        total = self._found.settings[job.setting]["training.total_tokens"]
        rows = read_rows(self._run_dirs / job.folder / "metrics.jsonl", last_bytes=1 << 16)
        rows = [row for row in rows if "train/loss" in row]
        return f"{job}: {rows[-1]['tokens'] / total:.0%}, {rows[-1]['train/loss']:.3f}" if rows else f"{job}: starting"


def report(found: Results, output: Path, margin: float, title: str, say: Say) -> list[Comparison]:
    """Write the page, the tables as JSON and the plot, and say every verdict. Raises ConfigError if no run has
    begun."""
    if not found.runs:
        raise ConfigError(f"{output}: no run has begun: there is nothing to report")
    found.save(output)
    lines = tables(found, margin)
    write_atomic(output / TABLES, (json.dumps([*map(asdict, lines)], indent=1) + "\n").encode())
    write_atomic(output / PAGE, page(found, lines, margin, title, PLOT).encode(errors="backslashreplace"))
    plot_gaps(curves(found), found.baseline, output / PLOT)
    for table in lines:
        for line in table.lines:
            place = f"{table.row} " if table.row else ""
            for kind in line.verdicts:
                if kind == "training" or line.losses[kind] is not None:
                    say(f"{place}{line.variant}, {kind} loss: {line.verdict(kind)}")
    say(f"{output / PAGE}")
    return lines


def read_folders(words: Sequence[str]) -> Results:
    """Read the results of earlier calls' folders as one. Run folders are read again where they exist. A word is FOLDER,
    or NAME=FOLDER to give its only row that name. Raises ConfigError if a folder holds no results, or the results do
    not fit together."""
    parts = []
    for word in words:
        row, _, name = word.partition("=") if is_assignment(word) else ("", "", word)
        found = results.load(Path(name))
        for job in dict.fromkeys([*found.question.jobs(), *found.runs]):  # This includes the runs of earlier commands.
            if job.setting in found.settings:
                _reread(found, job, Path(name) / "runs" / job.folder)
        parts.append((name, results.with_row(found, usable(row, word)) if row else found))
    return results.together(parts)
