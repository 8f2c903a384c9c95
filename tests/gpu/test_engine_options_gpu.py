"""Every two options of the engines that go together take the plain layout's steps on GPUs, and the same bits twice,
while the GPUs are busy before copies and collectives."""

import pytest
import torch

import engine_options
from distributed import run_distributed
from on_gpu import needs_gpu, world_of_one  # noqa: F401

GPUS = torch.cuda.device_count()
pytestmark = needs_gpu()
PARTS = {1: 3, 2: 2, 4: 1}
"""The parts of the rows for a world of so many GPUs. Each starts a world of its own, so that they run side by side.
Four GPUs take every value once, because two take every pair."""


def rows(gpus: int, part: int) -> list[engine_options.Row]:
    return engine_options.Table(gpus, pairs=gpus < 4).rows[part :: PARTS[gpus]]


@pytest.mark.usefixtures("world_of_one")
# The first pass takes a third of the rows of one GPU.
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, PARTS[1]))])
def test_a_gpu_takes_the_plain_steps(part: int) -> None:
    engine_options.check(engine_options.take(rows(1, part)))


@pytest.mark.parametrize("world", [f"{gpus} GPUs, part {part}" for gpus in (2, 4) for part in range(PARTS[gpus])])
def test_gpus_take_the_plain_steps(world: str) -> None:
    gpus, part = int(world[0]), int(world[-1])
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs, here are {GPUS}")
    for taken in run_distributed(engine_options.take, gpus, rows(gpus, part), backend="nccl"):
        engine_options.check(taken)
