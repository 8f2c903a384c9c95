"""Runs as users start them, with real launchers, kill -9 and SIGTERM. A run that continues equals one that was not
stopped."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

import tiny
from distributed import run_distributed
from forked import PATIENCE, Command
from manifests import rewrite
from runs import at_step, check_same, finish, free_port, log_of, ranks_of, rows_of, start, write_config
from sagetrain.cli.exits import Errors
from sagetrain.cluster.guard import StopSignal
from sagetrain.config import ConfigError
from sagetrain.costs.hardware import H200
from sagetrain.planning.plan import make_plan
from sagetrain.storage.url_path import location
from sagetrain.training import resume
from trained import make_trainer


def six_steps(
    corpus: str, run_dir: str, stop: bool, engine: str = "auto", said: list[str] | None = None
) -> tuple[bool, int]:
    """Take six steps of four micro-batches, or send a signal in the middle of the third step. Return whether the run
    finished, and its last step. `said` gets what it says to people."""
    trainer = make_trainer(
        corpus, run_dir, 6, hears=None if said is None else said.append,
        parallel={"engine": engine}, logging={"every_steps": 4, "tensorboard": False},
        checkpoint={"every_tokens": 10**9},  # A save would have a row, too.
        stability={"noise_scale": {"every_steps": 3}},
    )  # fmt: skip
    step_batches = trainer.run.loader.step_batches

    def signalled(*step: int):
        for number, batch in enumerate(step_batches(*step)):
            yield batch
            if number == 1 and trainer.state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    if stop and dist.get_rank() + 1 == dist.get_world_size():
        trainer.run.loader.step_batches = signalled
    return trainer.train(), trainer.state.step


def test_ranks_learn_of_a_signal_in_the_step_in_which_it_comes(tmp_path, corpus) -> None:
    assert run_distributed(six_steps, 2, str(corpus), str(tmp_path / "run"), True) == [(False, 3)] * 2


def test_a_rank_alone_stops_between_micro_batches(tmp_path, corpus) -> None:
    """On a CPU a step may take minutes, so the run does not wait for its end. Nothing is lost."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_distributed(six_steps, 1, str(corpus), str(whole), False) == [(True, 6)]
    assert run_distributed(six_steps, 1, str(corpus), str(cut), True) == [(False, 2)]
    assert [row["step"] for row in rows_of(cut) if "train/loss" in row] == [2]
    assert run_distributed(six_steps, 1, str(corpus), str(cut), False) == [(True, 6)]
    ends = [load_file(next((folder / "checkpoints/step-00000006").glob("*.safetensors"))) for folder in (whole, cut)]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][name].equal(ends[1][name]) for name in ends[0])


def of_the_former_default(corpus: str, whole: str, cut: str) -> tuple[list[tuple[bool, int]], list[str]]:
    """Train by DeepSpeed without a stop, and with one, after which the checkpoint forgets its engine, as checkpoints
    had none when `auto` was DeepSpeed. Continue it by `auto`. Return how the runs ended, and what was said last."""
    ends, said = [six_steps(corpus, run, run == cut, "deepspeed") for run in (whole, cut)], list[str]()
    folder = Path(cut) / "checkpoints/step-00000002"
    engines: list[str] = []
    rewrite(folder, lambda tree: engines.append(tree["state"].pop("engine")))
    assert engines == ["deepspeed"]
    plan = make_plan(folder / "config.yaml", ["parallel.engine=auto"], 1, H200)
    assert ("engine_kept", "info", "parallel.engine") in [(f.rule, f.level, f.key) for f in plan.findings]
    assert plan.layout.engine == "deepspeed"
    return [*ends, six_steps(corpus, cut, False, said=said)], said


def test_a_run_of_the_former_default_keeps_its_engine(tmp_path, corpus) -> None:
    """`auto` was DeepSpeed until it became FSDP2. A run of that time goes on by DeepSpeed, to the last bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ((ends, said),) = run_distributed(of_the_former_default, 1, str(corpus), str(whole), str(cut))
    assert ends == [(True, 6), (False, 2), (True, 6)]
    text = "\n".join(said)
    assert "is deepspeed here, as the run had it when it began; in a new run it is fsdp" in text
    assert (
        "set parallel.engine: fsdp to go on by fsdp from the same checkpoint" in text and "ZeRO 1 by DeepSpeed" in text
    )
    folders = [folder / "checkpoints/step-00000006" for folder in (whole, cut)]
    same, again = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
    assert same.keys() == again.keys() and all(same[name].equal(again[name]) for name in same)
    assert json.loads((folders[1] / "manifest.json").read_text())["state"]["engine"] == "deepspeed"


def evaluated(corpus: str, folders: list[str], signalled_at: list[int]) -> list[tuple[bool, int, list[int]]]:
    """Run one configuration after the other: six steps, with evaluations on eight batches after the third and the
    sixth. A signal comes to the last rank in the second batch after the given step. Return, for each run, whether it
    finished, its step, and the number of batches of each evaluation."""

    def run(run_dir: str, signalled: int) -> tuple[bool, int, list[int]]:
        trainer = make_trainer(corpus, run_dir, 6, data=data, evaluation=often, logging={"tensorboard": False})
        taken, eval_batches = list[int](), trainer.run.valid.eval_batches

        def counted(num_sequences: int):
            taken.append(0)
            for batch in eval_batches(num_sequences):
                taken[-1] += 1
                if taken[-1] == 2 and trainer.state.step == signalled and dist.get_rank() + 1 == ranks:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        trainer.run.valid.eval_batches = counted
        finished = trainer.train()
        return finished, trainer.state.step, taken

    ranks, data = int(os.environ["WORLD_SIZE"]), {"valid": [{"path": f"{corpus}/valid"}]}
    often = {"every_tokens": 3 * 4 * tiny.SEQ, "num_sequences": 8 * ranks}
    return [run(folder, step) for folder, step in zip(folders, signalled_at, strict=True)]


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["valid/loss"]) for row in rows_of(run_dir) if "valid/loss" in row]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_evaluation_is_made_when_continued(tmp_path, corpus, ranks) -> None:
    """A rank alone ends at the second batch. Several ranks have to agree and end one batch later. The signal comes in
    mid-run, again while the evaluation is made up for, and at the end. A finished evaluation is not repeated."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    folders, batches = [str(whole), *[str(cut)] * 5], 1 + ranks
    found = run_distributed(evaluated, ranks, str(corpus), folders, [0, 3, 3, 6, 0, 0])
    ends = [(False, 3, [batches]), (False, 3, [batches]), (False, 6, [8, batches]), (True, 6, [8]), (True, 6, [])]
    assert found == [[(True, 6, [8, 8]), *ends]] * ranks
    assert evaluations(cut) == evaluations(whole) and len(evaluations(cut)) == 2


def test_sigterm_to_a_whole_job_saves(tmp_path, corpus, pair) -> None:
    """Slurm sends the signal to the launcher and the ranks. The launcher alone would not pass it on."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2)
    ranks: list[psutil.Process] = []

    def signal_all(launcher: Command) -> None:
        ranks.extend(ranks_of(launcher))
        os.killpg(launcher.pid, signal.SIGTERM)

    at_step("deepspeed", config, 13, signal_all)
    # The launcher passes the signal on and leaves before its ranks do.
    assert ranks and psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []
    assert "stopped by SIG" in log_of(config)
    finish("ranks", config)  # Another launcher continues the run.
    check_same(tmp_path / "run", pair)


def test_two_hosts_of_a_hostfile_are_one_run(tmp_path, corpus, pair) -> None:
    """A launcher starts on each "host" of a hostfile, as where ssh is not allowed. Tensor parallelism spans the
    hosts."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node0 slots=1\nnode1 slots=1\n")
    where = [f"--hostfile={hostfile}", "--no_ssh", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    hosts = [start(["deepspeed", *where, f"--node_rank={rank}"], config) for rank in (0, 1)]
    assert [host.wait(PATIENCE) for host in hosts] == [0, 0], config.with_suffix(".log").read_text()[-3000:]
    check_same(tmp_path / "run", pair)


def test_a_run_over_slices_equals_one_over_whole_sequences(tmp_path, corpus) -> None:
    """The run has context parallel size 2, and one process stops and continues it. Losses, evaluations too, are those
    of one process."""
    sections = {
        "attention": {"backend": "sdpa"},
        "training": {"total_tokens": 20 * 256},
        "evaluation": {"every_tokens": 1024},
    }
    alone = write_config(tmp_path / "alone.yaml", corpus, tmp_path / "alone", **sections)
    finish("sagetrain", alone)
    first = write_config(
        tmp_path / "first.yaml", corpus, tmp_path / "run", parallel={"context_parallel_size": 2}, **sections
    )
    at_step("ranks", first, 8, lambda process: os.killpg(process.pid, signal.SIGTERM))
    log = first.with_suffix(".log").read_text()
    start = "2 ranks on cpu (tensor parallel 1 x context parallel 2 x data parallel 1)"
    assert start in (tmp_path / "run/log.txt").read_text()
    assert "stopped by SIGTERM at step" in log, log[-3000:]
    second = write_config(tmp_path / "second.yaml", corpus, tmp_path / "run", **sections)
    finish("sagetrain", second)
    assert "ranks: 2 wrote that checkpoint, 1 go on with it" in second.with_suffix(".log").read_text()
    for key, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("valid/loss", 1e-5)):
        ours, theirs = (
            {row["step"]: row[key] for row in rows_of(folder) if key in row}
            for folder in (tmp_path / "run", tmp_path / "alone")
        )
        assert ours == pytest.approx(theirs, abs=tolerance), key


def test_run_folder_holds_what_was_run(alone) -> None:
    run_dir = alone
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "fsdp.json", "findings.json", "metrics.jsonl", "tensorboard", "checkpoints"} <= names
    assert json.loads((run_dir / "fsdp.json").read_text())["gradient_sync"] == "last micro-step"
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["checkpoint"]["keep_last"] == 3
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 3
    assert list((run_dir / "tensorboard").glob("events*"))
    assert "parameters, 1 rank on cpu (tensor parallel 1 x data parallel 1)" in (run_dir / "log.txt").read_text()


def test_two_runs_in_one_folder_the_second_refuses(tmp_path, corpus) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")

    def second(process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGSTOP)  # The process cannot finish meanwhile.
        other = write_config(tmp_path / "other.yaml", corpus, tmp_path / "run")
        assert start("sagetrain", other).wait(PATIENCE) == 3
        assert "is in use by another run" in other.with_suffix(".log").read_text()
        process.send_signal(signal.SIGCONT)
        process.terminate()

    assert at_step("sagetrain", config, 2, second) == 0


RUN_DIR, WEIGHTS = "Restore these settings, or choose another training.run_dir", "(training.init_from="
OTHERS = "whose samples are others (the same files may be anywhere)"


@pytest.mark.parametrize(("section", "change", "words"), [
    ("training", {"seed": 5}, f"run: training.seed: checkpoint 0, this run 5. {RUN_DIR} {WEIGHTS}"),
    ("data", {"seq_length": 16}, f"run: data.seq_length: checkpoint 32, this run 16. {RUN_DIR} {WEIGHTS}"),
    ("model", {"ffn_hidden_size": 96}, f"model.ffn_hidden_size: checkpoint 64, this run 96. {RUN_DIR}\n"),
    ("checkpoint", {"resume": "never"}, "checkpoint.resume is never"),
])  # fmt: skip
def test_a_resume_of_something_else_is_refused(tmp_path, corpus, alone, section, change, words) -> None:
    """All ranks refuse alike. The error suggests to begin with these weights, if they fit."""
    config = write_config(tmp_path / "run.yaml", corpus, alone, **{section: change})
    before = sorted(str(path) for path in alone.rglob("*"))
    builds = (alone / "log.txt").read_text().count("(tensor parallel")
    assert start("ranks" if section == "model" else "sagetrain", config).wait(PATIENCE) == 2
    log = config.with_suffix(".log").read_text()
    again = (alone / "log.txt").read_text().count("(tensor parallel")
    assert words in log and again == builds, "auto was timed and the model built for nothing"
    assert log.count("error: ") == 1
    assert sorted(str(path) for path in alone.rglob("*")) == before


def test_a_resume_on_other_data_is_refused(tmp_path, corpus, alone) -> None:
    """The error names the path. If the path is the same, it names the hashes: the data was prepared again, with other
    tokens in the middle of a large file, for example, where the order of samples is the same."""
    run, other = (shutil.copytree(old, tmp_path / old.name) for old in (alone, corpus))
    record = json.loads((other / "train.json").read_text())
    (other / "train.json").write_text(json.dumps({**record, "sha256": "0" * 64}))
    config = write_config(tmp_path / "run.yaml", other, run)
    assert start("sagetrain", config).wait(PATIENCE) == 2
    now = f"this run {other}/train, {OTHERS}. {RUN_DIR}"
    assert f"another run: data.train: checkpoint {corpus}/train, {now}" in log_of(config)

    more = {"train": [{"path": f"{corpus}/train", "weight": 3.0}, {"path": f"{corpus}/valid"}]}
    config = write_config(tmp_path / "blend.yaml", corpus, run, data=more)
    assert start("sagetrain", config).wait(PATIENCE) == 2
    assert f"this run {corpus}/train (weight 3.0), {corpus}/valid, {OTHERS}. {RUN_DIR}" in log_of(config)

    for folder in run.glob("checkpoints/step-*"):
        rewrite(folder, lambda tree: tree["state"]["files"].update({"data.train (checksums in .json)": "0" * 64}))
    config = write_config(tmp_path / "again.yaml", corpus, run)
    assert start("sagetrain", config).wait(PATIENCE) == 2
    assert f"{corpus}/train has changed since: data.train (checksums in .json): checkpoint 000" in log_of(config)


def test_a_run_continued_with_another_schedule_says_so(tmp_path, corpus, alone) -> None:
    run_dir = shutil.copytree(alone, tmp_path / "run")
    stages = {"stages": [{"from_tokens": 0, "tokens": 256}]}
    longer = {"total_tokens": 15360 + 256}
    config = write_config(tmp_path / "run.yaml", corpus, run_dir, tokens_per_step=stages, training=longer)
    finish("sagetrain", config)
    log = log_of(config)
    assert "last step had 512 tokens, which tokens_per_step of this run makes 256" in log
    assert "the learning rate goes from 2.36e-06 in the checkpoint's last step to" in log
    assert "the run was to end at 15,360 tokens and now ends at 15,616; leave them" in log


def test_mistakes_end_the_run_before_it_starts(tmp_path, corpus) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", model={"num_layer": 3})
    assert start("ranks", config).wait(PATIENCE) == 2
    log = config.with_suffix(".log").read_text()
    assert "did you mean model.num_layers?" in log
    assert log.count("did you mean") == 1  # One rank speaks.
    assert not (tmp_path / "run").exists()


def test_an_unavailable_backend_is_named_before_ranks_meet(tmp_path, corpus) -> None:
    flash = {"attention": {"backend": "flash"}, "training": {"dtype": "bf16"}}
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, **flash)
    assert start("ranks", config).wait(PATIENCE) != 0
    log = config.with_suffix(".log").read_text()
    assert log.count("error: attention.backend flash needs a GPU") == 1
    assert not (tmp_path / "run").exists()


def test_non_finite_loss_stops_every_rank_and_saves_nothing(tmp_path, corpus) -> None:
    config = write_config(
        tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, optimizer={"lr": 1e30, "weight_decay": 0}
    )
    assert start("ranks", config).wait(PATIENCE) == 4
    assert "Nothing of this step was saved" in log_of(config)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def fail_and_be_ended() -> None:
    StopSignal()
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
    with Errors(rank=1):
        raise ConfigError("as on every rank")


def test_a_rank_that_fails_with_others_lets_the_launcher_end_it() -> None:
    """Training's own handler would wait on, and repeat the message of the first rank."""
    rank = multiprocessing.get_context("fork").Process(target=fail_and_be_ended)
    rank.start()
    rank.join()
    assert rank.exitcode == -signal.SIGTERM


def test_a_former_key_that_did_nothing_has_not_changed(tmp_path) -> None:
    cfg = tiny.config(3)
    for section, key, value, lines in (
        ("parallel", "gather_8_bits", False, []),
        ("parallel", "gather_8_bits", True, ["parallel.gather_8_bits: True -> None"]),
        ("attention", "smooth_q", False, []),
        ("attention", "smooth_q", True, ["attention.smooth_q: True -> None"]),
        ("linear", "recipe", "rowwise", []),
        ("linear", "recipe", "tensorwise", ["linear.recipe: 'tensorwise' -> None"]),
        ("attention", "recipe", "gradients", ["attention.recipe: 'gradients' -> 'auto'"]),
    ):
        tree = cfg.model_dump(mode="json")
        tree[section][key] = value
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        assert resume.changed(cfg, location(str(tmp_path))) == lines
