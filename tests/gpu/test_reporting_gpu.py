"""What a step and a hang report from a GPU: nothing waits for a metric, and NCCL's collectives are named."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from sagetrain.parallel.metrics import Metrics
from sagetrain.train.guard import collectives_under_way, flight_record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu"),
]


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


def test_a_collective_of_nccl_that_is_not_finished_is_named() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3, 5, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # two seconds, which the next one waits for
        dist.all_reduce(x)
        record = flight_record()
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()
    assert [entry["profiling_name"] for entry in json.loads(record)["entries"]].count("nccl:all_reduce") == 2
    assert "waits in nccl:all_reduce number " in collectives_under_way(record)
    assert "over Float [3, 5]" in collectives_under_way(record)
