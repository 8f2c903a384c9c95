"""Keepers, with real processes: ranks that die lead to new ranks, and the run ends with the bits of one left alone."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
from torch.distributed import HashStore

from forked import PATIENCE, Command
from held import hold, release
from kept import events_of, kill, ranks_of, restarted
from runs import ROOT, check_same, finish, log_of, reached, start, wait_for, when, write_config
from sagetrain.cluster.agreement import SILENT_BEATS, Agreement, suspects, why_it_ends
from sagetrain.cluster.lifeline import Death
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import load_config
from sagetrain.training.program import train_here


def check_restart(event: dict, rank: int | None) -> None:
    """Check what a restart says: who died, and seconds whose sum is the time from the death to the step."""
    parts = event["seconds"]
    assert event["why"] == "killed by SIGKILL" and rank in (None, event["rank"])
    assert {"found", "all ranks down", "processes begun", "ranks met", "state ready", "first step"} < parts.keys()
    assert sum(parts.values()) == pytest.approx(event["total"], abs=0.05)
    print("seconds from kill -9 to the end of the next step:", event["total"], parts)


def test_kill_9_under_torchrun_and_then_of_torchrun(tmp_path, corpus, pair) -> None:
    """The ranks save and leave when torchrun itself is killed, as they do without keepers."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, training={"restarts": 3})
    hold(config)
    process = start("torchrun", config)
    wait_for(process, config, reached(config, 12))
    kill(1)(process)
    wait_for(process, config, restarted(config, 1))
    (event,) = events_of(config)
    check_restart(event, 1)
    ranks = ranks_of(process)
    process.kill()
    psutil.wait_procs(ranks, timeout=PATIENCE)
    assert "stopped by SIGTERM" in log_of(config) and "another attempt" not in log_of(config)
    release(config)
    finish("ranks", config)
    check_same(tmp_path / "run", pair)


def test_two_ranks_die_at_once_under_deepspeed(tmp_path, corpus, pair) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, training={"restarts": 1})
    assert when("deepspeed", config, reached(config, 14), kill(0, 1)) == 0, log_of(config)[-3000:]
    (event,) = events_of(config)
    check_restart(event, None)
    assert "all ranks begin again (restart 1 of 1)" in log_of(config)
    check_same(tmp_path / "run", pair)


def test_a_signal_for_the_keeper_is_one_for_the_rank(tmp_path, corpus, alone) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", training={"restarts": 1})
    hold(config)
    process = start("sagetrain", config)
    wait_for(process, config, reached(config, 8))
    (rank,) = psutil.Process(process.pid).children()
    rank.kill()
    wait_for(process, config, restarted(config, 1))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert "stopped by SIGTERM" in log_of(config)
    release(config)
    finish("sagetrain", config)
    check_same(tmp_path / "run", alone)


DIES = """
import os, signal, sys, torch
from sagetrain.cluster.lifeline import generation
from sagetrain.config.errors import TrainingError
from sagetrain.engines.step import Engine

plain = Engine.step

def step(self, *how):
    at = generation(), self.optimizer_steps + 1
    if at == (0, 3):
        raise TrainingError("rank 0 is out of GPU memory") from torch.OutOfMemoryError("full")
    if at == (1, 5):
        raise RuntimeError("CUDA error: unspecified launch failure")
    if at == (2, 7):
        raise RuntimeError("no luck")
    if at == (3, 6):
        raise RuntimeError("no luck")
    return plain(self, *how)

Engine.step = step
from sagetrain.__main__ import program
program()
"""


def test_a_death_that_comes_again_ends_the_run(tmp_path, corpus) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    training = {"restarts": 9}
    config = write_config(
        tmp_path / "run.yaml", corpus, tmp_path / "run", training=training, evaluation={"every_tokens": 10**9}
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = Command(["python", str(script), "train", str(config)], env, config.with_suffix(".log"), tmp_path)
    assert command.wait(PATIENCE) == 4, log_of(config)[-3000:]
    said = log_of(config)
    assert [said.count(f"(restart {number} of 9)") for number in (1, 2, 3, 4)] == [1, 1, 1, 0]
    for words in (
        "died in step 3 (TrainingError: rank 0 is out of GPU memory",
        "died in step 5 (RuntimeError: CUDA error",
    ):
        assert words in said
    assert "died in step 6 (RuntimeError: no luck), after rank 0" in said and "does not get past it" in said


KILLED = Death(3, "node1", -9, "killed by SIGKILL", 48, 0.0, again=True)


@pytest.mark.parametrize(("deaths", "words"), [
    ([KILLED], ""),
    ([KILLED, replace(KILLED, step=49)], ""),
    ([KILLED, replace(KILLED, step=40)], "does not get past it"),
    ([KILLED, replace(KILLED, rank=2)], "does not get past it"),  # The reason is the same.
    ([KILLED, replace(KILLED, rank=2, why="hung", step=0)], ""),
    ([KILLED, replace(KILLED, code=2, again=False)], "another attempt would end in the same way"),
    ([replace(KILLED, step=step, memory=True) for step in (5, 90)], "memory ran out for the second time"),
    ([replace(KILLED, step=step) for step in range(4)], "after 3 restarts training.restarts allows no more"),
])  # fmt: skip
def test_which_deaths_lead_to_another_attempt(deaths, words) -> None:
    said = why_it_ends(deaths, 3)
    assert words in said and bool(words) == bool(said)


def test_hosts_on_which_ranks_died_twice_are_named() -> None:
    """A death on another host says that the host matters; where there is one host alone, it says nothing."""
    first, second, other = KILLED, replace(KILLED, rank=5, step=60), replace(KILLED, rank=9, host="node2", step=70)
    assert suspects([first, second]) == suspects([first, other]) == ""
    expected = "; hosts to look at, and to leave out of the next job: node1 (2 deaths)"
    assert suspects([first, second, other]) == expected
    assert why_it_ends([first, second, other], 2).endswith(f"training.restarts allows no more{expected}")
    assert why_it_ends([first, second, other], 3) == ""


def test_a_host_without_signs_of_life_is_named(monkeypatch) -> None:
    store, agreements = HashStore(), []
    for rank in (0, 8):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 16), ("LOCAL_RANK", 0)):
            monkeypatch.setenv(name, str(value))
        agreements.append(Agreement(store))
    first, second = agreements
    for _ in range(3 * SILENT_BEATS):
        for each in agreements:
            each._beat = 0.0  # The next beat is due.
            each.beat()
    assert first.lost() is None
    for _ in range(SILENT_BEATS + 1):  # The first look still sees the last sign.
        first._beat = 0.0
        first.beat()
    lost = second.death(0)
    assert lost.rank == 8 and not lost.again and "no sign of life for 30 s" in lost.said


CHILD = """
import os, signal
from sagetrain.cluster.lifeline import death, lifeline, tell
own = lifeline()
tell({"step": 5 + own.generation})
if own.generation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
print("generation", own.generation, "after", death().said, flush=True)
"""

PARENT = """
import sys, threading
from pathlib import Path
from torch.distributed import HashStore
from sagetrain.cluster import keeper
assert keeper.can_fork(["json"])
threading.Thread(target=threading.Event().wait, daemon=True).start()
forks = keeper.can_fork(["json"])
print("forks", forks, flush=True)
sys.orig_argv = ["python", sys.argv[1]]
keeper.Keeper(1, HashStore(), forks, Path("."), lambda text: print(text, flush=True)).run()
"""


def test_beside_threads_ranks_are_new_interpreters(tmp_path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    log = tmp_path / "log"
    words = ["python", str(tmp_path / "parent.py"), str(tmp_path / "child.py")]
    assert Command(words, os.environ, log, ROOT).wait(PATIENCE) == 0, log.read_text()
    said = log.read_text()
    assert "forks False" in said and "(restart 1 of 1)" in said
    assert "generation 1 after rank 0 on " in said and " died in step 5 (killed by SIGKILL)" in said


def test_restarts_that_cannot_be(tmp_path, corpus) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", training={"restarts": 2})
    changes = ["checkpoint.resume=never", "training.run_url=s3://bucket/run", "checkpoint.tolerate_minutes=5"]
    rules = {finding.rule for finding in check(load_config(config, changes), 1) if finding.level == "error"}
    assert rules >= {"restarts_resume", "tolerate_url"}
    with pytest.raises(ConfigError, match=r"training\.restarts 2: only the command `sagetrain train`"):
        train_here(
            load_config(config), [], lambda cfg: (None, None), [], loss=None, tokens=None, say=print, own_process=False
        )
