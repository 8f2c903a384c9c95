"""A keeper on a machine with GPUs opens none of them, and what it forks can compute on one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.controller import Taken
from sagetrain.stability.stragglers import METRIC, Stragglers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu"),
]

KEEPER = """
import os
import sagetrain.cli.train, sagetrain.interop.looks, sagetrain.training.build_run, sagetrain.training.trainer
from sagetrain.cluster import keeper
forks = keeper.can_fork([*keeper._LATE_MODULES, *keeper._ENGINE_MODULES["deepspeed"]])
print("forks", forks, flush=True)
if not (pid := os.fork()):
    import torch
    print("sum", torch.ones(1000, device="cuda").sum().item(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
import torch
torch.ones(1, device="cuda")
print("opened", keeper._has_cuda(), flush=True)
"""


def test_a_keeper_opens_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPER], capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout.splitlines()
    assert [line for line in said if line in ("forks True", "sum 1000.0", "opened True")] == said[-3:], done.stderr[
        -2000:
    ]


def test_the_time_of_a_gpu_comes_one_step_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    controller, metrics = Stragglers(0, ["host a"], 1, device), Metrics()
    for step in range(1, 4):
        with controller.timed(metrics):
            torch.cuda._sleep(20_000_000)
        metrics.reduce(device)  # It waits for the GPU, as the end of every step does.
        torch.cuda.synchronize()
        assert controller.after_step(Taken(step, step, 1, {METRIC: 1.0})) == []
        assert (controller._times[0] > 1e-3) == (step > 1)
