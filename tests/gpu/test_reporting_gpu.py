"""Reports from a GPU about a step, a hang and a lack of memory. No metric waits for the GPU, NCCL's collectives are
named, and so is the line that allocated the held memory."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tiny
from on_gpu import needs_gpu
from sagetrain.cluster.guard import collectives_under_way, flight_record
from sagetrain.config.errors import TrainingError
from sagetrain.parallel.metrics import Metrics
from sagetrain.training.out_of_memory import ENTRIES, memory_explained, record_allocations
from sagetrain.training.writers import memory_retries

pytestmark = needs_gpu()


def test_adding_a_metric_does_not_wait_for_the_gpu() -> None:
    device, metrics = torch.device("cuda"), Metrics()
    value = torch.full((1,), 2.0, dtype=torch.bfloat16, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metrics.mean("mean", value, weight=2)
            metrics.sum("sum", value, copies=2)
            metrics.max("largest", value[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    metrics.sum("number", 1)
    assert metrics.reduce(device) == {"mean": 2.0, "sum": 3.0, "largest": 2.0, "number": 1.0}


def recorded(record: str) -> list[str]:
    """Name the collectives of a flight record, the last call last. Earlier tests of this process may have made some."""
    return [entry["profiling_name"] for entry in json.loads(record).get("entries", [])]


def test_a_collective_of_nccl_that_is_not_finished_is_named() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3, 5, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # The GPU sleeps for two seconds, and the next collective waits for it.
        dist.all_reduce(x)
        record = flight_record()
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()
    assert recorded(record)[-2:] == ["nccl:all_reduce"] * 2
    assert "waits in nccl:all_reduce number " in collectives_under_way(record)
    assert "over Float [3, 5]" in collectives_under_way(record)


def test_a_full_gpu_is_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    room, size = 512 * 2**20, torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room) / size)
    try:
        before = memory_retries(device)
        torch.empty(room // 2, dtype=torch.uint8, device=device)  # Nobody holds it, and PyTorch keeps its memory.
        assert memory_retries(device) == before
        torch.empty(room * 3 // 4, dtype=torch.uint8, device=device)
        assert memory_retries(device) == before + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def run_out_of_memory(folder: Path, held: list[torch.Tensor]) -> None:
    with memory_explained(tiny.config(1, training={"run_dir": str(folder)}), tiny.VOCAB):
        for _ in range(ENTRIES):
            torch.empty(1, device="cuda")
        held.append(torch.empty(48 * 2**20, dtype=torch.uint8, device="cuda"))
        torch.empty(2**44, dtype=torch.uint8, device="cuda")


def test_the_snapshot_names_the_line_that_allocated(tmp_path: Path) -> None:
    """The snapshot keeps a bounded number of the latest allocations."""
    held: list[torch.Tensor] = []
    record_allocations(torch.device("cuda"))
    try:
        with pytest.raises(TrainingError, match=r"by which line, is in .*/memory/rank-0"):
            run_out_of_memory(tmp_path, held)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = pickle.loads((tmp_path / "memory/rank-0.pickle").read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    (block,) = [block for block in blocks if block["address"] == held[0].data_ptr()]
    assert (__file__, "run_out_of_memory") in [(frame["filename"], frame["name"]) for frame in block["frames"]]
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    assert 0 < len(trace) <= ENTRIES and "oom" in {entry["action"] for entry in trace[-10:]}
