"""`sagetrain compare` trains real runs side by side, is stopped and continued, and writes its page."""

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import Command
from held import file_of, hold, release
from runs import ended, rows_of, sagetrain, write_config, write_metrics
from sagetrain.cluster.run_folder import lock
from sagetrain.comparing import results, run_records, runner
from sagetrain.comparing.analysis import curves, tables
from sagetrain.comparing.command import TABLES, Places, compare, read_folders, report
from sagetrain.comparing.compare_request import CompareRequest
from sagetrain.comparing.comparison_page import page
from sagetrain.comparing.plot import plot_gaps
from sagetrain.comparing.question import Job, Question
from sagetrain.comparing.results import Call, Results
from sagetrain.comparing.run_records import DIVERGED, FAILED, FINISHED, STOPPED, Record
from sagetrain.config import ConfigError
from sagetrain.config.load import load_config

PAPER = "paper: attention.recipe=paper"
SHORT = ["training.total_tokens=5120", "logging.tensorboard=false"]  # A run has 20 steps of 8 sequences.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    return write_config(folder / "base.yaml", corpus, folder / "run", attention={"recipe": "fine"})


def start(words: Sequence[str], env: Mapping[str, str], log: Path) -> Command:
    """Start a run in a fork, which saves the seconds of its imports."""
    return Command(["sagetrain", "train", *words], dict(env), log, Path.cwd())


def ask(base: Path, variants: Sequence[str] = (PAPER,), overrides: Sequence[str] = SHORT, **more: object) -> Question:
    return CompareRequest([str(base)], variants, [], overrides, **{"seeds": 2, "band": 1, **more}).question()


def go(question: Question, output: Path, **more: object) -> tuple[Results, list[str]]:
    said: list[str] = []
    where = Places(output, output / "runs", (), 2, "CPU")
    found = compare(question, where, said.append, **{"command": "sagetrain compare base.yaml", "start": start, **more})
    return found, said


@pytest.fixture(scope="module")
def done(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of five runs: two seeds of two variants, and the baseline again."""
    output = tmp_path_factory.mktemp("output")
    found, said = go(ask(base), output)
    assert [run.status for run in found.runs.values()] == [FINISHED] * 5, said
    report(found, output, 0.01, "", said.append)
    return output


def losses(output: Path, folder: str) -> list[tuple[int, float]]:
    return [(row["tokens"], row["train/loss"]) for row in rows_of(output / "runs" / folder) if "train/loss" in row]


def test_pairs_share_samples_and_initialization(done: Path) -> None:
    first = {name: losses(done, name) for name in ("base/seed-0", "base/seed-0-again", "paper/seed-0", "base/seed-1")}
    assert len({tuple(tokens for tokens, _ in run) for run in first.values()}) == 1
    begin = {name: run[0][1] - first["base/seed-0"][0][1] for name, run in first.items()}
    assert abs(begin["base/seed-0-again"]) < 2e-6
    assert 0 < abs(begin["paper/seed-0"]) < 5e-5 < abs(begin["base/seed-1"])
    assert first["base/seed-0-again"] != first["base/seed-0"]


def test_the_page_has_what_a_reader_needs(done: Path) -> None:
    page = (done / "README.md").read_text()
    for part in (
        *("Does `paper` end on another loss than `base`?", "- `paper`: attention.recipe = paper", "| paper | 2 |"),
        *("sagetrain compare base.yaml", "rounding band", "Seed band", "could see", "![gap over tokens](gap.png)"),
        *("What it does not show", "a claim that separates two settings needs three", " passes)"),
        "t(0.975, n - 1) s / sqrt(n)",
    ):
        assert part in page, part
    assert (done / "gap.png").read_bytes().startswith(b"\x89PNG")
    (table,) = json.loads((done / "results.json").read_text())
    (line,) = table["lines"]
    gaps = [losses(done, f"paper/seed-{seed}")[-1][1] - losses(done, f"base/seed-{seed}")[-1][1] for seed in (0, 1)]
    verdict = line["verdicts"]["training"]
    assert verdict["differences"] == pytest.approx(gaps, abs=2e-6)  # The last 5 % of 20 steps is the last step.
    assert verdict["gap"] == pytest.approx(sum(gaps) / 2, abs=2e-6)
    assert verdict["uncertainty"] == pytest.approx(12.7062 * abs(gaps[0] - gaps[1]) / 2, abs=1e-4)
    assert line["verdicts"]["validation"]["gap"] is not None


@pytest.mark.parametrize("kept", ["the small files", "the runs without checkpoints"])
def test_finished_runs_are_not_repeated_and_seeds_are_added(done: Path, base: Path, tmp_path: Path, kept: str) -> None:
    """The comparison goes on on another machine, which has either the small files or the runs without checkpoints. An
    earlier version, which did not have all keys, may have written the small files."""
    if kept == "the small files":
        shutil.copyfile(done / results.LOSSES, tmp_path / results.LOSSES)
        tree = json.loads((done / results.QUESTION).read_text())
        for settings in tree["settings"].values():
            del settings["model.value_embeddings"], settings["optimizer.lr_of.head"]
        (tmp_path / results.QUESTION).write_text(json.dumps(tree))
    else:
        shutil.copytree(done / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("checkpoints"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    started: list[str] = []

    def stopped(words: Sequence[str], env: Mapping[str, str], log: Path) -> SimpleNamespace:
        """Start a run that is stopped before its first step."""
        started.append(str(log.relative_to(tmp_path / "runs")))
        return ended(0)

    found, said = go(ask(base, seeds=3), tmp_path, start=stopped)
    assert "7 runs, 2 to go" in said[0] and started == ["base/seed-2.log", "paper/seed-2.log"]
    earlier = results.load(done)
    assert {job: found.runs[job] for job in earlier.runs} == earlier.runs
    assert len(found.calls) == 1 + (kept == "the small files")
    assert all(call.seconds > 0 for call in found.calls)  # The calls may have begun in the same minute.
    assert all(path.read_bytes() == text for path, text in before.items() if path.parent != tmp_path)


def test_a_folder_of_other_settings_is_not_continued(done: Path, base: Path, tmp_path: Path) -> None:
    tree = json.loads((done / results.QUESTION).read_text())
    shutil.copyfile(done / results.LOSSES, tmp_path / results.LOSSES)
    tree["settings"]["/paper"]["linear.precision"] = "fp8"
    (tmp_path / results.QUESTION).write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"different settings for paper:\n  linear\.precision: 'auto' and 'fp8'\n"):
        go(ask(base), tmp_path)


def test_one_comparison_at_a_time_writes_a_folder(base: Path, tmp_path: Path) -> None:
    held, _ = lock(tmp_path)
    with held, pytest.raises(ConfigError, match="is in use by another comparison; wait for it, or use another --out"):
        go(ask(base), tmp_path)
    assert not (tmp_path / results.QUESTION).exists()
    (tmp_path / "page").touch()
    refused = sagetrain("compare", base, *SHORT, "--band", 1, "-o", tmp_path / "page")
    assert refused.returncode == 2 and f"error: {tmp_path / 'page'} cannot be written: File exists" in refused.stderr


def test_a_run_trains_in_its_folder_whatever_the_name(base: Path, tmp_path: Path) -> None:
    question = ask(base, branch=2560, band=0)
    for name in ("a #1", "b: c", "@d [e", 'f "g" \\h', "\u00e4"):
        for job in question.jobs():
            path, *overrides = question.command(job, tmp_path / name)
            cfg = load_config(path, overrides)
            assert cfg.training.run_dir == str(tmp_path / name) and cfg.training.seed == job.seed
            assert cfg.checkpoint.keep_every_tokens == (2560 if job.variant == "base" else None)
    # The user's own interval holds if it is a divisor of the needed one.
    for own, kept in ((1280, 1280), (5120, 2560), (10**9, 2560)):
        question = ask(base, overrides=[*SHORT, f"checkpoint.keep_every_tokens={own}"], branch=2560, band=0)
        path, *overrides = question.command(next(question.jobs()), tmp_path)
        assert load_config(path, overrides).checkpoint.keep_every_tokens == kept


def test_another_question_in_the_same_folder_is_refused(done: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match=r"different settings for paper:\n  attention\.recipe: 'scores' and 'paper'"):
        go(ask(base, ["paper: attention.recipe=scores"]), done)
    kept = {path: path.read_bytes() for path in (done / results.QUESTION, done / results.LOSSES)}
    for path in kept:
        path.unlink()
    try:
        with pytest.raises(ConfigError, match=r"holds a run with other settings:\n  optimizer\.lr: 0\.003 there, 0\.1"):
            go(ask(base, overrides=[*SHORT, "optimizer.lr=0.1"]), done)
    finally:
        for path, text in kept.items():
            path.write_bytes(text)


def test_records_of_unknown_runs_are_not_written_over(done: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / results.LOSSES).write_bytes((done / results.LOSSES).read_bytes())
    with pytest.raises(ConfigError, match=r"losses\.jsonl holds runs, and no compare\.json beside it says of what"):
        go(ask(base), tmp_path)
    assert (tmp_path / results.LOSSES).read_bytes() == (done / results.LOSSES).read_bytes()


def until_told(folder: Path) -> Callable[..., Command]:
    """Return a function that starts runs which wait before their fourth step until two of them have got SIGTERM."""
    hold(runs := folder / "runs.yaml", 4)
    told: list[Command] = []

    class Held(Command):
        def send_signal(self, number: int) -> None:
            super().send_signal(number)
            told.extend([self] * (number == signal.SIGTERM and self not in told))
            if len(told) == 2:
                release(runs)

    return lambda words, env, log: Held(
        ["sagetrain", "train", *words], {**env, "HELD": str(file_of(runs))}, log, Path.cwd()
    )


def three_steps(folder: Path) -> bool:
    """Return whether both runs have taken three steps."""
    runs = [folder / "runs" / name / "seed-0" / "metrics.jsonl" for name in ("base", "other")]
    return all(path.exists() and '"step": 3,' in path.read_text() for path in runs)


def test_stopped_by_a_signal_the_same_command_continues(base: Path, tmp_path: Path) -> None:
    question = ask(base, ["other: optimizer.weight_decay=0.0"], seeds=1, band=0)
    seen: list[Command] = []
    begin = until_told(tmp_path)

    def interrupted(words: Sequence[str], env: Mapping[str, str], log: Path) -> Command:
        seen.append(begin(words, env, log))
        return seen[-1]

    class Once(runner.Stop):
        """A source of one SIGTERM to this process, sent as soon as both runs have taken three steps."""

        def __bool__(self) -> bool:
            if not self.why and three_steps(tmp_path):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__bool__()

    where = Places(tmp_path, tmp_path / "runs", (), 2, "CPU")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Stop", Once)
        first = compare(question, where, said.append, command="x", start=interrupted)
    assert [run.status for run in first.runs.values()] == [STOPPED, STOPPED], said
    assert len(seen) == 2 and "stopped by SIGTERM; the same command continues" in said
    assert "SIGTERM: 2 runs to save and stop; a second signal ends them at once" in said
    second, _ = go(question, tmp_path)
    assert [run.status for run in second.runs.values()] == [FINISHED, FINISHED]
    assert "resumed from step-" in (tmp_path / "runs/base/seed-0.log").read_text()
    tokens = [at for at, _ in losses(tmp_path, "base/seed-0")]
    assert tokens == sorted(set(tokens)) and tokens[-1] == 5120


def test_the_time_limit_stops_like_a_signal(base: Path, tmp_path: Path, monkeypatch) -> None:
    """The time is up when both runs have taken three steps."""
    clock = SimpleNamespace(monotonic=lambda: float(three_steps(tmp_path)), sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    question = ask(base, ["other: optimizer.weight_decay=0.0"], seeds=1, band=0)
    found, said = go(question, tmp_path, time_limit=1.0, start=until_told(tmp_path))
    assert any(text.startswith("stopped by --time-limit;") for text in said)
    assert [run.status for run in found.runs.values()] == [STOPPED, STOPPED]


def test_a_run_that_fails_is_told_and_the_others_go_on(base: Path, tmp_path: Path) -> None:
    """The runs are replaced by their exit codes. Code 4 after a step that went wrong is a divergence. Missing data ends
    with 1, and a run out of memory with 4 too."""
    codes = {"wild": 4, "broken": 1, "large": 4, "base": 0}
    started: list[str] = []

    def ends(words: Sequence[str], env: Mapping[str, str], log: Path) -> SimpleNamespace:
        run_dir = Path(load_config(words[0], words[1:]).training.run_dir)
        name = run_dir.parent.name
        started.append(name)
        log.write_text("".join(f"line {n}\n" for n in range(20)) + f"{name} ends")
        write_metrics(run_dir, 5120 if name == "base" else 256, 5.0)
        # A spike that was trained on does not end the run.
        event = {"step": 2, "action": "stop"} if name == "wild" else {"step": 1}
        if name in ("wild", "large"):
            (run_dir / "events.jsonl").write_text(json.dumps({**event, "tokens": 256, "kind": "spike"}) + "\n")
        return ended(codes[name])

    variants = [f"{name}: optimizer.lr={lr}" for lr, name in enumerate(codes, 7) if name != "base"]
    question = ask(base, variants, seeds=1, band=0)
    where = Places(tmp_path, tmp_path / "runs", (), 2, "CPU")
    said: list[str] = []
    found = compare(question, where, said.append, command="x", start=ends)
    assert [run.status for run in found.runs.values()] == [FINISHED, DIVERGED, FAILED, FAILED]
    assert any("wild seed 0: diverged after 256 tokens" in text and "wild ends" in text for text in said)
    broken = found.runs[Job("", "broken", 0)].said
    assert "line 19" in broken and "line 2\n" not in broken
    (table,) = report(found, tmp_path, 0.01, "", said.append)
    losses = {line.variant: line.losses["training"] for line in (table.baseline, *table.lines)}
    # Runs that did not finish have no mean.
    assert losses == {"base": 5.0, "wild": None, "broken": None, "large": None}
    page = (tmp_path / "README.md").read_text()
    assert "diverged in 1 of 1; no pair" in page
    assert "(failed, not by its losses): broken seed 0" in page and "large seed 0" in page
    assert [run.job.variant for run in found.failed([Job("", "broken", 0), Job("", "wild", 0)])] == ["broken"]
    started.clear()  # A failed run is tried again, a diverged run is not.
    compare(question, where, said.append, command="x", start=ends)
    assert started == ["broken", "large"]


# -- many folders, and pages without runs ------------------------------------------------------------------------


SETTINGS = {"training.total_tokens": 50_000, "data.valid": [1], "optimizer.lr": 1e-3}


def made(question: Question, gap: float, seeds: Sequence[int], row: str = "", settings: dict | None = None) -> Results:
    """Make results of runs that never took place. Losses fall as 3 + 1 / step, and the variant ends `gap` higher."""

    def run(variant: str, seed: int, again: bool, extra: float) -> Record:
        noise = 0.001 * math.sin(7 * seed + extra)
        train = [[1000 * n, 3 + 1 / n + 0.02 * seed + noise + extra * n / 50] for n in range(1, 51)]
        end = train[-1][1]
        return Record(row, variant, seed, again, FINISHED, 50_000, 50_000, 100, end, end + 0.1, 1e5, 400.0, {}, train)

    runs = [run(variant, seed, False, extra) for seed in seeds for variant, extra in (("base", 0.0), ("paper", gap))]
    runs += [run("base", seed, True, 0.0005) for seed in seeds]
    tree = settings or SETTINGS
    known = {f"{row}/{variant.name}": tree for variant in question.variants}
    call = Call(f"2026-11-22 10:0{seeds[0]} UTC", f"call {row} {seeds[0]}", "2 x NVIDIA H200", "torch 2.13", 600.0, 2)
    rows = tuple(replace(each, name=row) for each in question.rows)
    asking = replace(question, rows=rows, seeds=len(seeds), first_seed=seeds[0])
    return Results(asking, known, 43_000_000, 10_000, [call], run_records.merged(runs))


def test_several_calls_become_one_page(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ran on a fresh machine, from which the small files came back. The page has the seeds and rows of all
    calls, by variant and seed."""
    question = ask(base)
    for name, seeds, row in (("a", [0, 1], "16K"), ("b", [2, 3], "16K"), ("c", [0], "1M")):
        made(question, 0.02, seeds, row).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found, said = read_folders(["a", "b", "c"]), []
    small, large = report(found, Path("page"), 0.005, "What does it cost?", said.append)
    assert len(small.lines[0].verdicts["training"].differences) == 4
    assert small.lines[0].verdicts["training"].call == "worse"
    assert small.noise_scale == 400.0 and small.again == 4
    assert large.lines[0].verdicts["training"].call == "undecided"
    (told,) = (text for text in said if text.startswith("16K paper, training loss: "))
    assert told.startswith("16K paper, training loss: worse by 0.0200 ± ") and told.endswith(", inside the seed band")
    page = Path("page/README.md").read_text()
    for part in (
        *("# What does it cost?", "call 16K 0", "call 16K 2", "(60 GPU minutes)", "## 16K", "## 1M"),
        *("50,000 tokens at 1M (5.0 passes)", "tokens per step are 0.25 of it", "Generalization: past 4 passes"),
    ):
        assert part in page, part
    again = read_folders(["page"])  # The page can be made again from its own folder.
    assert tables(again, 0.005) == tables(found, 0.005)
    (first, _) = curves(found)
    assert len(first.gaps["paper"]) == 4 and first.rounding_band and first.seed_band


def test_the_command_makes_a_page_of_folders(base: Path, tmp_path: Path) -> None:
    for name, seeds in (("a", [0, 1]), ("b", [2])):
        made(ask(base), 0.02, seeds).save(tmp_path / name)
    output = tmp_path / "page"
    done = sagetrain("compare", "--report-only", tmp_path / "a", tmp_path / "b", "-o", output, "--margin", 0.5)
    assert done.returncode == 0, done.stderr
    assert "paper, training loss: level within 0.5" in done.stderr and str(output / "README.md") in done.stderr
    assert len((output / "losses.jsonl").read_text().splitlines()) == 9
    done = sagetrain("compare", base, "--variant", "other: data.seq_length=16")
    assert done.returncode == 2 and "error: these runs cannot be compared; nothing was started" in done.stderr


def test_folders_without_rows_become_rows_by_a_name_for_each(base: Path, tmp_path: Path) -> None:
    """The two calls differ in a setting that all runs of a call share, for instance tokens per step. No folder
    changes."""
    made(ask(base), 0.02, [0]).save(tmp_path / "a")
    other = ask(base, ["paper: attention.recipe=paper", "late: optimizer.lr=0.1"])
    made(other, 0.03, [0], settings=SETTINGS | {"optimizer.lr": 2e-3}).save(tmp_path / "b")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    words = [f"16K={tmp_path / 'a'}", f"1M={tmp_path / 'b'}"]
    for given in (words, words[:1]):
        refused = sagetrain("compare", "--report-only", *given)
        assert refused.returncode == 2 and "become a page of its own: name its folder with --output" in refused.stderr
    typo = sagetrain("compare", "--report-only", tmp_path / "typo")
    assert typo.returncode == 2 and "holds no compare.json: name folders" in typo.stderr
    with pytest.raises(ConfigError, match=r"have different settings for base:(?s:.*)NAME=FOLDER"):
        read_folders([str(tmp_path / "a"), str(tmp_path / "b")])
    found = read_folders(words)
    report(found, tmp_path / "page", 0.005, "", lambda text: None)
    page = (tmp_path / "page/README.md").read_text()
    assert "## 16K" in page and "## 1M" in page and page.count("| paper | 1 |") == 2
    assert {path: path.read_bytes() for path in before} == before
    assert tables(read_folders([str(tmp_path / "page")]), 0.005) == tables(found, 0.005)
    with pytest.raises(ConfigError, match="it has the rows 16K, 1M: one row gets a name"):
        read_folders([f"all={tmp_path / 'page'}"])


def test_the_page_says_what_a_variant_of_a_later_row_is(base: Path, tmp_path: Path) -> None:
    changed = SETTINGS | {"attention.recipe": "fine"}
    first = made(ask(base), 0.02, [0], "16K", changed)
    later = made(ask(base, ["late: attention.recipe=scores"]), 0.02, [0], "1M", changed)
    later.settings["1M/late"] = changed | {"attention.recipe": "scores"}
    found = results.together([("a", first), ("b", later)])
    assert "- `late`: attention.recipe = scores" in page(found, tables(found, 0.01), 0.01, "", "gap.png")


def test_the_page_says_what_folders_that_became_rows_differ_in(base: Path, tmp_path: Path) -> None:
    for name, recipe, lr in (("a", "paper", 1e-3), ("b", "scores", 4e-3)):
        folder = made(ask(base), 0.02, [0], settings=SETTINGS | {"optimizer.lr": lr, "attention.recipe": "fine"})
        folder.settings["/paper"] = folder.settings["/paper"] | {"attention.recipe": recipe}
        folder.save(tmp_path / name)
    found = read_folders([f"low={tmp_path / 'a'}", f"high={tmp_path / 'b'}"])
    text = page(found, tables(found, 0.01), 0.01, "", "gap.png")
    assert "- `paper`: attention.recipe = paper at low; attention.recipe = scores at high" in text
    assert "## low\n\n100 tokens per step" in text and "## high\n\noptimizer.lr=0.004; 100 tokens per step" in text


def test_runs_that_would_begin_with_other_weights_are_refused(base: Path, tmp_path: Path) -> None:
    """training.init_from names a run that has gone on since the first pair, so new runs would begin with other
    weights."""
    short = [*SHORT, "training.total_tokens=512", "checkpoint.every_tokens=256", "lr_schedule.warmup_tokens=256"]
    go(ask(base, [PAPER], short, seeds=1, band=0), tmp_path / "first")
    source = tmp_path / "first/runs/base/seed-0"
    newest = sorted((source / "checkpoints").glob("step-*"))[-1]
    begins = [*short, f"training.init_from={source}"]
    aside = newest.rename(tmp_path / newest.name)
    found, said = go(ask(base, [PAPER], begins, seeds=1, band=0), tmp_path / "second")
    assert [run.status for run in found.runs.values()] == [FINISHED] * 2, said
    aside.rename(newest)
    more = ask(base, [PAPER, "late: optimizer.lr=1e-4"], begins, seeds=1, band=0)
    with pytest.raises(ConfigError, match=r"late seed 0 would begin with .*step-00000002, and base seed 0 began with"):
        go(more, tmp_path / "second")
    oldest = min((source / "checkpoints").glob("step-*"))
    begins, other = [*short, f"training.init_from={oldest}"], f"other: training.init_from={newest}"
    meant = ask(base, [other], begins, seeds=1, band=0, allow=["training.init_from"])
    found, said = go(meant, tmp_path / "third")
    assert [run.status for run in found.runs.values()] == [FINISHED] * 2, said


def test_folders_of_different_questions_are_refused(base: Path, tmp_path: Path) -> None:
    question = ask(base)
    made(question, 0.02, [0]).save(tmp_path / "a")
    made(question, 0.02, [1], settings=SETTINGS | {"optimizer.lr": 2e-3}).save(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"different settings for base:\n  optimizer\.lr: 0\.001 and 0\.002"):
        read_folders([str(tmp_path / "a"), str(tmp_path / "b")])
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"holds no compare\.json"):
        read_folders([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"holds no compare\.json: name folders"):
        read_folders([str(base)])
    (tmp_path / "a" / results.LOSSES).write_text('{"row": 1}\n')
    with pytest.raises(ConfigError, match="not what sagetrain compare writes"):
        read_folders([str(tmp_path / "a")])


def test_a_run_is_finished_behind_its_last_evaluation(tmp_path: Path) -> None:
    """A run may have been stopped before its last evaluation. The noise scale is that of the run's second half."""
    steps = [{"train/loss": 3.0, "train/tokens_per_step": 10, "perf/tokens_per_second": 9.0}] * 10
    rows = [{"step": n, "tokens": 10 * n, **row, "noise/all/scale_tokens": n * 100} for n, row in enumerate(steps, 1)]
    wanted = {40: STOPPED, 100: FINISHED}  # The keys are the tokens at the last evaluation.
    for tokens, status in wanted.items():
        lines = [*rows, {"step": tokens // 10, "tokens": tokens, "valid/loss": 3.5}]
        lines.sort(key=lambda row: row["tokens"])
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = run_records.read_run(Job("", "base", 0), tmp_path, 100, evaluated=True)
        assert (run.status, run.valid_end, run.noise_scale) == (status, 3.5, 750)
        assert run_records.read_run(Job("", "base", 0), tmp_path, 100, evaluated=False).status == FINISHED


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_ends_on_no_number_diverged(base: Path, tmp_path: Path, loss: float) -> None:
    """The curve of such a run has places that are no number, too. The other seeds are compared as before."""
    found = made(ask(base), 0.02, [0, 1, 2])
    for job, losses in ((Job("", "paper", 1), {"valid_end": loss}), (Job("", "base", 2), {"train_end": loss})):
        run = found.runs[job]
        train = [[tokens, loss if tokens > 30_000 else value] for tokens, value in run.train]
        found.runs[job] = replace(run, train=train, **losses)
    (table,) = report(results.together([("", found)]), tmp_path, 0.01, "", print)
    assert (table.baseline.finished, table.baseline.diverged) == (2, (2,))
    (line,) = table.lines
    assert line.verdict("validation").startswith("diverged in 1 of 3; not decided: one pair (+0.0200)")
    assert json.loads((tmp_path / TABLES).read_text(), parse_constant=pytest.fail)


def test_numbers_of_a_run_that_are_not_finite_are_no_rates(tmp_path: Path) -> None:
    row = {"train/loss": 3.0, "train/tokens_per_step": 10, "perf/tokens_per_second": 9.0}
    rows = [
        {"step": n, "tokens": 10 * n, **row, "noise/all/scale_tokens": scale, "quant_noise/all/bias_to_gradient": scale}
        for n, scale in enumerate((math.inf, math.nan, 7.0), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_records.read_run(Job("", "base", 0), tmp_path, 30, evaluated=False)
    assert (run.status, run.noise_scale, run.bias_to_gradient) == (FINISHED, 7, 7.0)


def test_of_two_records_of_a_run_the_finished_one_counts() -> None:
    stopped = Record("", "paper", 0, False, STOPPED, tokens=900)
    diverged, finished = replace(stopped, status=DIVERGED, tokens=100), replace(stopped, status=FINISHED, tokens=1000)
    for order in ([stopped, diverged, finished], [finished, diverged, stopped]):
        assert run_records.merged(order) == {finished.job: finished}
    further = replace(stopped, tokens=950)
    assert run_records.merged([further, stopped]) == {stopped.job: further}


def test_a_long_name_of_the_baseline_is_whole_in_the_plot(base: Path, tmp_path: Path) -> None:
    plot_gaps(curves(made(ask(base), 0.02, [0, 1])), "a_baseline_with_a_long_name" * 3, tmp_path / "gap.png")
    from matplotlib.image import imread  # Kernels forked from here would have its backend.

    picture = imread(tmp_path / "gap.png")
    assert all((edge == 1).all() for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1])), "white"


# -- pairs that part later ---------------------------------------------------------------------------------------------


# Checkpoints follow steps of 256 tokens, at 1,024, 2,048, 3,072 and 4,096. The first one after 3,080 comes more than
# 1,000 tokens later.
SAVES = [*SHORT, "checkpoint.every_tokens=1000", "checkpoint.keep_last=1"]
EQUAL = "equal: logging.layer_norms_every_steps=1000"  # This variant has other settings, but the same steps.


def test_the_others_go_on_from_a_checkpoint_of_the_baseline(base: Path, tmp_path: Path) -> None:
    def over(words: Sequence[str], env: Mapping[str, str], log: Path) -> Command:
        process = start(words, env, log)
        process.wait()  # Nobody looked at the checkpoints while the run trained, so it kept the last one only.
        return process

    question = ask(base, [PAPER, EQUAL], SAVES, seeds=1, band=1, branch=3080)
    found, said = go(question, tmp_path, start=over)
    assert [run.status for run in found.runs.values()] == [FINISHED] * 4, said
    begin, *_ = sorted(found.runs[Job("", "paper", 0)].valid)
    whole, paper, equal = (losses(tmp_path, f"{name}/seed-0") for name in ("base", "paper", "equal"))
    parted = [(tokens, loss) for tokens, loss in whole if tokens > 4096]
    assert equal == parted and whole[0][0] < 4096 < parted[0][0]
    assert [tokens for tokens, _ in paper] == [tokens for tokens, _ in parted]
    assert 0 < abs(paper[0][1] - parted[0][1]) < 1e-3 and begin[0] >= 4096
    again = losses(tmp_path, "base/seed-0-again")
    assert again != parted and again == [(tokens, pytest.approx(loss, abs=1e-3)) for tokens, loss in parted]
    assert "resumed from step-" in (tmp_path / "runs/paper/seed-0.log").read_text()
    report(found, tmp_path, 0.01, "", said.append)
    page = (tmp_path / "README.md").read_text()
    assert "Runs of a pair are one up to 3,080 tokens" in page and "- What variants do before runs part." in page
    assert re.search(r"rounding band 0\.\d+ \(1 pair\)", page)

    with pytest.raises(ConfigError, match="--branch: None and 3080"):
        go(replace(question, branch=0), tmp_path)
    more = ask(base, ["more: optimizer.weight_decay=0"], SAVES, seeds=1, band=0, branch=3080)
    shutil.rmtree(tmp_path / "runs/base/seed-0/checkpoints")
    with pytest.raises(ConfigError, match=r"more seed 0 goes on from base seed 0 at 3,080 tokens, and .* has no check"):
        go(more, tmp_path)


def test_runs_without_a_checkpoint_to_go_on_from_are_named(base: Path, tmp_path: Path) -> None:
    def fails(words: Sequence[str], env: Mapping[str, str], log: Path) -> SimpleNamespace:
        log.write_text("no GPU")
        return ended(1)

    found, said = go(ask(base, [PAPER], SAVES, seeds=1, band=0, branch=3080), tmp_path, start=fails)
    assert [run.status for run in found.runs.values()] == [FAILED]
    assert "paper seed 0: not started: base seed 0 has no checkpoint at 3,080 tokens" in said
