"""The GPUs on which `sagetrain compare` starts its runs, and its answer to runs that fail or find no memory. No run is
trained."""

import errno
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runs import ended, write_config, write_metrics
from sagetrain.comparing import command, runner
from sagetrain.comparing.command import Places, compare
from sagetrain.comparing.compare_request import CompareRequest
from sagetrain.comparing.question import Job, Question
from sagetrain.comparing.run_records import FAILED, FINISHED
from sagetrain.config.load import load_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    return write_config(folder / "base.yaml", corpus, folder / "run", attention={"recipe": "fine"})


def ask(base: Path, variants: Sequence[str]) -> Question:
    return CompareRequest([str(base)], variants, [], ["training.total_tokens=7680"], seeds=1).question()


def test_runs_are_dealt_out_to_gpus_and_to_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in runner.slots(("3", "5"), 2, 16)] == ["3", "5", "3", "5"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert runner.slots((), 2, 16) == [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"}] * 2


def test_a_run_without_memory_is_tried_again_with_fewer_beside(base: Path, tmp_path: Path) -> None:
    """There are two GPUs with three places each, and one has memory for two runs only. The third run there fails once
    and goes on when another one has ended. No third run is begun on that GPU afterwards. A run that fails by itself, or
    alone on its GPU, has failed."""
    there: dict[str, list[str]] = {"0": [], "1": []}
    most: dict[str, int] = {"0": 0, "1": 0}
    attempts: list[str] = []

    class Running:
        def __init__(self, name: str, gpu: str, log: Path, run_dir: Path):
            self.name, self.gpu, self.log, self.run_dir, self.polls = name, gpu, log, run_dir, 0
            attempts.append(name)
            there[gpu].append(name)
            self.full = name == "giant" or (gpu == "0" and len(there[gpu]) > 2)
            most[gpu] = max(most[gpu], len(there[gpu]) - self.full)

        def poll(self) -> int | None:
            self.polls += 1
            if self.polls < (2 if self.full else 4):
                return None
            there[self.gpu].remove(self.name)
            if self.full:
                self.log.write_text("step 1\nrank 0 is out of GPU memory: CUDA out of memory.\n")
                return 4
            if self.name == "broken":
                self.log.write_text("rank 0 is out of GPU memory\n" + "another start\n" * 3 + "error: its own\n")
                return 1
            write_metrics(self.run_dir, 7680, 5.0)
            return 0

    def start(words: Sequence[str], env: Mapping[str, str], log: Path) -> Running:
        run_dir = Path(load_config(words[0], words[1:]).training.run_dir)
        return Running(run_dir.parent.name, env["CUDA_VISIBLE_DEVICES"], log, run_dir)

    names = ["broken", *(f"run{n}" for n in range(7))]
    question = ask(base, [f"{name}: optimizer.lr={n}e-3" for n, name in enumerate(names, 4)])
    said: list[str] = []
    where = Places(tmp_path / "a", tmp_path / "a/runs", ("0", "1"), 3, "two GPUs")
    found = compare(question, where, said.append, command="x", start=start)
    status = {job.variant: run.status for job, run in found.runs.items()}
    assert status == {"base": FINISHED} | dict.fromkeys(names, FINISHED) | {"broken": FAILED}
    assert sum("out of GPU memory beside 2 other runs; it goes on later" in line for line in said) == 1
    assert most == {"0": 2, "1": 3}
    # Only the run that found the GPU full was started twice.
    assert sorted(Counter(attempts).values()) == [1] * 8 + [2]
    question = ask(base, ["giant: optimizer.lr=4e-3"])
    where = Places(tmp_path / "b", tmp_path / "b/runs", ("1",), 1, "a GPU")
    found = compare(question, where, said.append, command="x", start=start)
    assert found.runs[Job("", "giant", 0)].status == FAILED and attempts.count("giant") == 1


def test_more_runs_than_the_memory_is_planned_for_are_told(base: Path, tmp_path: Path) -> None:
    """A GPU has 4 GiB, and a run takes 1.5 with CUDA's context, so two fit. The memory is an estimate, so no run is
    refused."""

    def said(memory: int) -> list[str]:
        where = Places(tmp_path / str(memory), tmp_path / str(memory), ("0",), 3, "a GPU", memory)
        lines: list[str] = []
        question = ask(base, ["large: data.micro_batch_size=8"])
        compare(question, where, lines.append, command="x", start=lambda words, env, log: ended(1))
        assert sum("failed after 0 tokens" in line for line in lines) == 2
        return [line for line in lines if "at a time fit into a GPU" in line]

    (one, other) = said(4 * 2**30)
    assert one.startswith("base: a run takes 1.5 GiB of 4.0, as planned: 2 at a time fit into a GPU, not 3; those that")
    assert other.startswith("large: a run takes 1.5 GiB")
    assert said(6 * 2**30) == said(0) == []


def test_no_run_goes_on_behind_an_error_of_the_command(tmp_path: Path) -> None:
    """The error is, for example, a full disk. Nobody would know of runs that nobody waits for, and they would keep the
    GPUs."""
    told: list[tuple[str, int]] = []

    class Running:
        def __init__(self, variant: str):
            self.variant = variant

        def poll(self) -> int | None:
            return 0 if self.variant == "short" else None

        def send_signal(self, number: int) -> None:
            told.append((self.variant, number))

    def ended(job: Job, code: int | None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    jobs = [Job("", variant, 0) for variant in ("long", "short")]
    every = runner.Runner(
        [{}, {}],
        lambda job: [job.variant],
        lambda job: tmp_path / "log",
        ended,
        lambda running: None,
        lambda words, env, log: Running(words[0]),
    )
    with pytest.raises(OSError, match="No space left"):
        every.run(jobs, runner.Stop())
    assert told == [("long", signal.SIGTERM)]


def test_after_a_time_limit_the_second_signal_ends_all_at_once() -> None:
    with runner.Stop(0.0) as stop:
        assert stop
        ended = [(signal.raise_signal(signal.SIGTERM), stop.at_once)[1] for _ in range(2)]
    assert ended == [False, True]


def test_the_machine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H200, 143771\necho NVIDIA H200, 143771\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,7")
    where = command.places(tmp_path, None, 4)
    assert (where.gpus, where.devices) == (("2", "7"), "2 x NVIDIA H200, 4 runs at a time on each")
    assert where.memory == 143771 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1,3")
    assert command.places(tmp_path, None, 4).gpus == ("0", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert command.places(tmp_path, None, 4).gpus == ("0", "1")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # The driver does not answer.
    where = command.places(tmp_path, None, 4)
    assert (where.devices, where.memory) == ("2 x GPU, 4 runs at a time on each", 0)
    assert command.places(tmp_path, None, 1).devices == "2 x GPU, 1 run at a time on each"
