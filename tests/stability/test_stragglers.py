"""Slow ranks are named, and no others, whatever the speed of the host: the tests give the times."""

import numpy as np
import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.engines.protocol import Observers
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability import stragglers
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.stragglers import METRIC, STEPS, Stragglers

RANKS = 16


def made(stage_size: int = RANKS) -> Stragglers:
    return Stragglers(0, [f"host node{rank // 8}" for rank in range(RANKS)], stage_size, torch.device("cpu"))


def told(controller: Stragglers, step: int, times: np.ndarray, tokens: int = 256) -> list[Event]:
    """Tell the controller of a step, as the reduction and the trainer do."""
    metrics = Metrics()
    with controller.timed(metrics):
        pass
    score = metrics._functions[METRIC](*times)
    return controller.after_step(Taken(step, step * tokens, tokens, {METRIC: score}))


def noisy(draw: np.random.Generator) -> np.ndarray:
    """Return times around 1 s, a tenth of them with an interruption."""
    return draw.lognormal(0.0, 0.05, RANKS) + 0.5 * (draw.random(RANKS) < 0.1)


def test_a_rank_that_is_a_fifth_slower_is_named_alone() -> None:
    draw, controller = np.random.default_rng(0), made()
    for step in range(1, 1001):
        assert told(controller, step, noisy(draw)) == []
    slow, named = np.where(np.arange(RANKS) == 11, 1.25, 1.0), []
    for step in range(1001, 1101):
        named += [(step, event) for event in told(controller, step, slow * draw.lognormal(0.0, 0.02, RANKS))]
    by_others, by_itself = sorted(named, key=lambda each: each[1].fields["than"], reverse=True)
    for step, event in (by_others, by_itself):
        assert step <= 1060 and event.kind == "straggler" and event.fields["rank"] == 11
        assert "rank 11 (host node1) has been slower than" in event.text
    assert by_others[1].fields["relative"] == pytest.approx(0.8, abs=0.06)


def test_a_slow_rank_says_what_the_driver_says_of_its_gpu(tmp_path, monkeypatch, capsys) -> None:
    """The program that stands for the driver's says what it was asked."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in\nnvlink) printf "Link 0: Replay Errors: 2\\nLink 0: CRC Errors: 5\\n";;\n'
        '*) test "$4" = GPU-1a-2b && echo "165, 1200, 1980, 88, 0x0000000000000040, 3";;\nesac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    names = [f"host a, cuda {rank} (NVIDIA H200, GPU-1a-{rank}b)" for rank in range(4)]
    controllers = [Stragglers(rank, names, 4, torch.device("cpu")) for rank in (2, 3)]
    for step in range(1, STEPS + 2):
        for controller in controllers:
            told(controller, step, np.array([1.0, 1.0, 1.25, 1.0]))
    said = "serial number 165, SM clock in MHz 1200, at most 1980, degrees Celsius 88, throttle reasons "
    said += "0x0000000000000040, uncorrected ECC errors 3, NVLink errors 7\n"
    assert capsys.readouterr().err == f"rank 2 ({names[2]}): {said}"


def test_what_all_ranks_share_names_nobody() -> None:
    """Longer documents slow all ranks down, a stage of a pipeline may have more work than another one, and steps of
    another number of tokens begin anew."""
    draw, controller = np.random.default_rng(1), made(stage_size=8)
    stages = np.repeat([1.0, 2.0], 8)
    for step in range(1, 301):
        work = stages * (1.5 if step > 100 else 1.0)
        tokens = 512 if step > 200 else 256
        assert told(controller, step, work * draw.lognormal(0.0, 0.02, RANKS), tokens) == []
    slow = np.where(np.arange(RANKS) == 3, 1.3, 1.0) * stages
    for step in range(301, 300 + STEPS):
        assert told(controller, step, slow, 512 if step % 40 else 256) == []


def ranks_with_clocks() -> tuple[list[str], float]:
    """Train on two ranks. The clock of rank 1 says that its passes take 1.3 s, that of rank 0 says 1 s."""
    stragglers.STEPS = 5
    engine = tiny.engine(tiny.config(1), tiny.join(1))
    rank, now = engine.groups.rank, [0.0]

    def clock() -> float:
        now[0] += 1.3 if rank else 1.0
        return now[0]

    controller, named, score = Stragglers(rank, ["host a", "host b"], 2, engine.device, clock), [], 0.0
    for step in range(1, 8):
        result = tiny.global_step(engine, step, observers=Observers(timed=controller.timed))
        score = result.metrics[METRIC]
        named += [event.text for event in controller.after_step(Taken(step, step, 64, result.metrics))]
    return named, score


def test_the_times_of_all_ranks_come_with_the_reduction() -> None:
    for named, score in run_distributed(ranks_with_clocks, 2):
        assert score == pytest.approx(1 / 1.3)
        (text,) = named
        assert text.startswith("rank 1 (host b) has been slower than the other ranks of its stage for 5 steps")
