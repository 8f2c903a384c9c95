"""A keeper on a machine with GPUs opens none of them, and what it forks computes on one and times it."""

import subprocess
import sys

from on_gpu import needs_gpu

pytestmark = needs_gpu()

KEEPER = """
import os
import sagetrain.cli.train, sagetrain.interop.looks, sagetrain.training.build_run, sagetrain.training.trainer
from sagetrain.cluster import keeper

def rank():
    import torch
    from sagetrain.parallel.metrics import Metrics
    from sagetrain.stability.controller import Taken
    from sagetrain.stability.stragglers import METRIC, Stragglers

    device, metrics = torch.device("cuda", 0), Metrics()
    controller = Stragglers(0, ["host a"], 1, device)
    for step in range(1, 4):
        with controller.timed(metrics):
            torch.cuda._sleep(20_000_000)
        metrics.reduce(device)
        torch.cuda.synchronize()  # The end of a step waits for the GPU.
        assert controller.after_step(Taken(step, step, 1, {METRIC: 1.0})) == []
        # The time of a step comes with the next one.
        assert (controller._times[0] > 1e-3) == (step > 1)
    print("sum", torch.ones(1000, device=device).sum().item(), flush=True)

forks = keeper.can_fork(keeper._LATE_MODULES)
print("forks", forks, flush=True)
if not (pid := os.fork()):
    rank()
    os._exit(0)
os.waitpid(pid, 0)
import torch
torch.ones(1, device="cuda")
print("opened", keeper._has_cuda(), flush=True)
"""


def test_a_keeper_opens_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPER], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-3:] == ["forks True", "sum 1000.0", "opened True"], done.stderr[-2000:]
