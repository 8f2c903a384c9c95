"""Copies in memory from a GPU have the state of the moment of the call, however late the GPU's work is."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import tiny
from on_gpu import needs_gpu, world_of_one  # noqa: F401
from sagetrain.checkpoint.in_memory import CopiesInMemory
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.reading import Reader
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.storage.url_path import Location

pytestmark = [*needs_gpu(), pytest.mark.usefixtures("world_of_one")]
SIZE = 20_000_001


def test_a_copy_is_of_the_moment_of_the_call() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run, said = f"test-{os.getpid()}", []
    shard = tiny.owned("w", {kind: torch.zeros(SIZE, device="cuda") for kind in KINDS})
    tensors = [shard.read(kind) for kind in KINDS]
    copies = CopiesInMemory(run, ParallelGroups.single(), {}, 1, said.append)
    copies.prepare([shard], "{}")
    began = 0.0
    for step in (1, 2, 3):
        torch.cuda._sleep(100_000_000)  # The update of the step has not run yet when the copy is taken.
        for value, tensor in enumerate(tensors):
            tensor.fill_(step + 10 * value)
        began = time.perf_counter()
        copies.take(tiny.run_state(step, step * tiny.SEQ), 0, {})
        began = time.perf_counter() - began
        copies.settle()
        for tensor in tensors:  # The next update.
            tensor.fill_(-1.0)
        assert copies.busy
        while copies.busy:
            time.sleep(0.001)
    assert began < 0.02, "the host does not wait for the copy"
    newest: Location | None = CopiesInMemory(run, ParallelGroups.single(), {}, 1, said.append).newest(0, 0)
    assert newest
    for value, kind in enumerate(KINDS):
        assert Reader(newest).local("w", kind, 0, 1).eq(3 + 10 * value).all()
    copies.end()
    assert said == []
