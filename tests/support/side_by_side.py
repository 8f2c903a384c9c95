"""A pytest plugin (-p side_by_side) that runs the GPU tests in several processes (-n auto) on all GPUs of a host.

The processes divide the GPUs and the cores among themselves, and each begins with one of the longest tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest
import torch

from gpu_seen import Seen, test_of

PER_GPU = 12
"""The largest number of processes on one GPU. They compile most of the time, and tests with the largest tensors (20
GiB) may meet."""
CORES = len(os.sched_getaffinity(0))
UNKNOWN = 5.0
"""The seconds that a test is taken to need before it was ever timed."""


def share_of(worker: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a process. It sees all GPUs, so that tests of several GPUs find them, and begins to count
    at its own. Its share of the cores computes, and Triton kernels are compiled in the process itself: a pool of
    processes for each test process would take longer to start than it saves."""
    first, threads = worker % len(gpus), str(max(1, CORES // workers))
    visible = ",".join([*gpus[first:], *gpus[:first]])
    return {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def dealt(items: Sequence[pytest.Item], seconds: Mapping[str, float], workers: int) -> list[pytest.Item]:
    """Order tests so that the shares that xdist's worksteal makes of them begin with the longest tests, each followed
    by a short one. A process keeps the next test while others steal what comes behind it."""
    longest_first = sorted(items, key=lambda item: -seconds.get(test_of(item.nodeid), UNKNOWN))
    shares = [longest_first[n::workers] for n in range(min(workers, len(items)))]
    # The last shares are the larger ones, as worksteal has it.
    return [item for first, *rest in reversed(shares) for item in (first, *rest[-1:], *rest[:-1])]


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # xdist has its own answer.
def pytest_xdist_auto_num_workers() -> int:
    return max(1, min(PER_GPU * torch.cuda.device_count(), CORES * 3 // 4))


def pytest_configure(config: pytest.Config) -> None:
    """Give a process its share. No test module is imported yet, so the GPUs and the compiler are not in use."""
    if hasattr(config, "workerinput") and (count := torch.cuda.device_count()):
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.environ.update(share_of(number, config.workerinput["workercount"], gpus.split(",")))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(trylast=True)  # The first pass has chosen its tests by then.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = dealt(items, Seen().seconds(), config.workerinput["workercount"])
