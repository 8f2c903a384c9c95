"""Rank arithmetic, process groups and DeepSpeed's view of them."""

import inspect
import sys

import pytest
import torch
import torch.distributed as dist

import forked
from distributed import run_distributed
from sagetrain.engines.deepspeed.mpu import Mpu
from sagetrain.parallel.topology import ParallelGroups, Topology


@pytest.mark.parametrize(
    ("world_size", "tp", "cp"),
    [(1, 1, 1), (8, 1, 1), (8, 8, 1), (512, 4, 1), (48, 6, 1), (8, 1, 8), (48, 6, 4), (16, 2, 2)],
)
def test_every_rank_is_in_exactly_one_group_of_each_axis(world_size: int, tp: int, cp: int) -> None:
    topology = Topology(world_size, tp, cp)
    assert topology.data_parallel_size * cp * tp == topology.num_replicas * tp == world_size
    for ranks_of, size in (
        (topology.tp_ranks, tp),
        (topology.cp_ranks, cp),
        (topology.replica_ranks, world_size // tp),
    ):
        groups = {tuple(ranks_of(rank)) for rank in range(world_size)}
        assert sorted(sum(groups, ())) == list(range(world_size))
        assert all(len(group) == size for group in groups)
    for rank in range(world_size):
        dp_rank, cp_rank, tp_rank = topology.coords(rank)
        assert topology.tp_ranks(rank)[tp_rank] == rank
        assert topology.cp_ranks(rank)[cp_rank] == rank
        assert topology.replica_ranks(rank)[dp_rank * cp + cp_rank] == rank
        assert ParallelGroups(topology, rank).replica_rank == dp_rank * cp + cp_rank


def test_tensor_then_context_parallel_ranks_are_neighbours() -> None:
    assert Topology(8, 4).tp_ranks(5) == [4, 5, 6, 7]
    assert Topology(8, 4).replica_ranks(5) == [1, 5]
    assert Topology(16, 2, 1, 2, 4).expert_ranks(13) == [12, 13, 14, 15]
    assert Topology(16, 2, 1, 2, 4).expert_copies(13) == [9, 13]
    assert Topology(16, 2, 4).tp_ranks(13) == [12, 13]
    assert Topology(16, 2, 4).cp_ranks(13) == [9, 11, 13, 15]
    assert Topology(16, 2, 4).replica_ranks(13) == [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize(("sizes", "message"), [
    ((6, 4), "not a multiple"), ((4, 2, 4), "tensor_parallel_size 2 x context_parallel_size 4"), ((0, 1), ">= 1"),
    ((2, 0), ">= 1"), ((2, 1, 0), ">= 1"), ((8, 1, 1, 2, 3), "expert_parallel_size 3 does not divide the 4 ranks"),
])  # fmt: skip
def test_impossible_topologies(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(*sizes)


def test_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is outside 0\.\.3"):
        Topology(4, 2).coords(4)


def test_single_needs_no_process_group() -> None:
    groups = ParallelGroups.single()
    assert (groups.tp_size, groups.cp_size, groups.dp_size, groups.num_replicas) == (1, 1, 1, 1)
    assert (groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.replica_rank) == (0, 0, 0, 0)
    assert groups.tp_group is groups.cp_group is groups.replica_group is None


def _groups_of_four() -> dict:
    with pytest.raises(ValueError, match="topology is for 8 ranks, the job has 4"):
        ParallelGroups.create(Topology(8, 2))
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    # Without the error, NCCL would wait for ranks that never come.
    with pytest.raises(ValueError, match="made with a device_id"):
        ParallelGroups.create(Topology(4, 2))
    dist.group.WORLD.bound_device_id = None
    groups, slices = (ParallelGroups.create(Topology(4, *sizes)) for sizes in ((2,), (1, 2)))
    mpu = Mpu(groups)
    assert Mpu(slices).get_data_parallel_world_size() == 4  # Gradients are averaged over slices too.
    assert groups.cp_group is None
    sums = []
    for group in (groups.tp_group, groups.replica_group, slices.cp_group, slices.replica_group):
        value = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    answers = {name: method() for name, method in inspect.getmembers(mpu, inspect.ismethod) if name.startswith("get_")}
    return {"sums": sums, "answers": {name: value for name, value in answers.items() if isinstance(value, int)}}


def test_groups_and_mpu_in_four_processes() -> None:
    results = run_distributed(_groups_of_four, 4)
    sums = [r["sums"] for r in results]
    assert [s[:2] for s in sums] == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]
    assert [s[2:] for s in sums] == [[11, 1111], [11, 1111], [1100, 1111], [1100, 1111]]
    for rank, answers in enumerate(r["answers"] for r in results):
        assert answers["get_model_parallel_rank"] == answers["get_tensor_model_parallel_rank"] == rank % 2
        assert answers["get_data_parallel_rank"] == rank // 2
        assert answers["get_tensor_model_parallel_src_rank"] == rank // 2 * 2
        assert {v for name, v in answers.items() if name.endswith("world_size")} == {2}


def _many_in_flight() -> None:
    """Run many collectives at once. If two threads ended them, one would soon abort here, or hang."""
    group, rank = ParallelGroups.create(Topology(2, 2)).tp_group, dist.get_rank()
    assert group._get_backend(torch.device("cpu")).options._threads == 1
    ops, x = torch.ops._c10d_functional, torch.arange(64.0) + 100 * rank
    gathered, scattered = torch.cat([x - 100 * rank, x - 100 * rank + 100]), (2 * x + 100 - 200 * rank).chunk(2)[rank]
    for _ in range(200):
        flying = [
            start
            for _ in range(4)
            for start in (
                ops.all_gather_into_tensor(x, 2, group.group_name),
                ops.reduce_scatter_tensor(x, "sum", 2, group.group_name),
            )
        ]
        for i, result in enumerate(map(ops.wait_tensor, flying)):
            assert torch.equal(result, scattered if i % 2 else gathered)


def test_many_collectives_in_flight() -> None:
    run_distributed(_many_in_flight, 2)


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


def _not_imported() -> list[str]:
    return [name for name in forked.IMPORTED if name not in sys.modules]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU every rank imports for itself")
def test_ranks_start_with_everything_imported() -> None:
    """A name that cannot be imported would be passed over in silence, and cost every rank seconds."""
    assert run_distributed(_not_imported, 1) == [[]]
