"""Rank arithmetic, process groups and DeepSpeed's view of them."""

import inspect

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from sagetrain.parallel.topology import Mpu, ParallelGroups, Topology


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (8, 1), (8, 8), (512, 4), (48, 6)])
def test_every_rank_is_in_exactly_one_group_of_each_axis(world_size: int, tp: int) -> None:
    topology = Topology(world_size, tp)
    assert topology.data_parallel_size * tp == world_size
    for ranks_of, size in ((topology.tp_ranks, tp), (topology.dp_ranks, world_size // tp)):
        groups = {tuple(ranks_of(rank)) for rank in range(world_size)}
        assert sorted(sum(groups, ())) == list(range(world_size))
        assert all(len(group) == size for group in groups)
    for rank in range(world_size):
        dp_rank, tp_rank = topology.coords(rank)
        assert topology.tp_ranks(rank)[tp_rank] == rank
        assert topology.dp_ranks(rank)[dp_rank] == rank


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert Topology(8, 4).tp_ranks(5) == [4, 5, 6, 7]
    assert Topology(8, 4).dp_ranks(5) == [1, 5]


@pytest.mark.parametrize(("world_size", "tp", "message"), [(6, 4, "not a multiple"), (0, 1, ">= 1"), (2, 0, ">= 1")])
def test_impossible_topologies(world_size: int, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(world_size, tp)


def test_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is outside 0\.\.3"):
        Topology(4, 2).coords(4)


def test_single_needs_no_process_group() -> None:
    groups = ParallelGroups.single()
    assert (groups.tp_size, groups.dp_size, groups.tp_rank, groups.dp_rank) == (1, 1, 0, 0)
    assert groups.tp_group is None
    assert groups.dp_group is None


def _groups_of_four() -> dict:
    with pytest.raises(ValueError, match="topology is for 8 ranks, the job has 4"):
        ParallelGroups.create(Topology(8, 2))
    groups = ParallelGroups.create(Topology(4, 2))
    mpu = Mpu(groups)
    sums = []
    for group in (groups.tp_group, groups.dp_group):
        value = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    answers = {name: method() for name, method in inspect.getmembers(mpu, inspect.ismethod) if name.startswith("get_")}
    return {"sums": sums, "answers": {name: value for name, value in answers.items() if isinstance(value, int)}}


def test_groups_and_mpu_in_four_processes() -> None:
    results = run_distributed(_groups_of_four, 4)
    assert [r["sums"] for r in results] == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]
    for rank, answers in enumerate(r["answers"] for r in results):
        assert answers["get_model_parallel_rank"] == answers["get_tensor_model_parallel_rank"] == rank % 2
        assert answers["get_data_parallel_rank"] == rank // 2
        assert answers["get_tensor_model_parallel_src_rank"] == rank // 2 * 2
        assert {v for name, v in answers.items() if name.endswith("world_size")} == {2}


def test_mpu_promises_no_other_axis() -> None:
    mpu = Mpu(ParallelGroups.single())
    for name in ("get_pipe_parallel_world_size", "get_sequence_parallel_world_size", "get_expert_parallel_group"):
        assert not hasattr(mpu, name)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the second rank's own message")
    dist.barrier()


def test_helper_reports_the_failing_rank() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 raised(.|\n)*the second rank's own message"):
        run_distributed(_fail_on_rank_one, 2)
