"""Saving from a GPU goes through pinned memory of exactly the state's size, and in order with the GPU's work."""

import torch

import tiny
from on_gpu import needs_gpu
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.checkpoint.reading import Reader
from sagetrain.parallel.topology import ParallelGroups

pytestmark = needs_gpu()
SIZE = 50_000_001


def test_what_is_saved_is_the_moment_of_the_call(tmp_path) -> None:
    shard = tiny.owned("w", {kind: torch.zeros(SIZE, device="cuda") for kind in KINDS})
    tensors = {kind: shard.read(kind) for kind in shard.kinds}
    saver = tiny.saver(tmp_path, ParallelGroups.single())
    saver.reserve([shard])
    saver.pin()
    assert saver._memory.is_pinned()
    assert saver._memory.nbytes == 12 * SIZE
    memory = saver._memory.data_ptr()
    for step in (1, 2):
        torch.cuda._sleep(100_000_000)  # The update of the step has not run yet when the save is called.
        for value, tensor in enumerate(tensors.values()):
            tensor.fill_(step + 10 * value)
        saver.start(tiny.run_state(step, step * tiny.SEQ), "{}", [shard], {})
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        saver.wait()
        reader = Reader(tmp_path / folder_name(step))
        for value, kind in enumerate(KINDS):
            assert reader.local("w", kind, 0, 1).eq(step + 10 * value).all()
    assert saver._memory.data_ptr() == memory
