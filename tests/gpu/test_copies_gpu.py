"""Collectives by copy engines agree with NCCL on two or more GPUs, one process each."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from distributed import run_distributed
from on_gpu import needs_gpu
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.engines.sharding import rows_of
from sagetrain.engines.whole_weights import WholeWeights
from sagetrain.model.compile import compile_blocks
from sagetrain.parallel import copies
from sagetrain.parallel.collectives import finish, start_all_gather, start_reduce_scatter
from sagetrain.parallel.copies import SLOTS
from sagetrain.parallel.topology import ParallelGroups, Topology

GPUS = torch.cuda.device_count()
pytestmark = needs_gpu(gpus=2)
OPS = torch.ops._c10d_functional
ROWS = {"even": 8, "uneven": 5, "one": 1, "gain": 12}
"""Rows that ranks share evenly, unevenly, and so that the last rank has none."""


def _join() -> ParallelGroups:
    """Join all ranks as one tensor-parallel group of NCCL, connected for copies."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=60))
    assert copies.connect(group) == ""
    return ParallelGroups(Topology(size, size), rank, tp_group=group)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def _busy(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * 1.5e9))


def _check_against_nccl() -> None:
    """Compare collectives of random sizes, dtypes, delays and orders of finishing, with up to 2 SLOTS under way. Memory
    is used again at once. Gathered tensors are the same bit for bit, and sums differ by their rounding. The same sum
    has the same bits each time."""
    groups = _join()
    group, size, rank = groups.tp_group, groups.tp_size, groups.tp_rank
    choices, delays, pending = random.Random(3), random.Random(100 + rank), []

    def compare() -> None:
        kind, actual, expected, largest = pending.pop(choices.randrange(len(pending)))
        actual, expected = finish(actual), finish(expected)
        if kind == "gather":
            assert torch.equal(actual, expected)
        else:
            bound = size * largest * torch.finfo(actual.dtype).eps
            assert (actual.double() - expected.double()).abs().max() <= bound

    for repetition in range(200):
        kind, dtype = choices.choice(("gather", "scatter")), choices.choice((torch.bfloat16, torch.float32))
        rows = size * choices.choice((1, 3, 7, 64, 1001))
        # The memory has to grow once, late in the run.
        width = choices.choice((1, 5, 2048)) * (8 if repetition == 150 else 1)
        x = _random(1000 * rank + repetition, rows, width).to(dtype)
        if kind == "gather":
            expected = OPS.all_gather_into_tensor(x.clone(), size, group.group_name)
        else:
            expected = OPS.reduce_scatter_tensor(x.clone(), "sum", size, group.group_name)
        if delays.random() < 0.3:
            _busy(delays.uniform(0, 2e-3))
        actual = (start_all_gather if kind == "gather" else start_reduce_scatter)(x, group)
        del x
        _busy(delays.uniform(0, 2e-4))
        # These values overwrite any memory that was freed too early.
        torch.empty(rows * width, device="cuda").fill_(float("nan"))
        pending.append((kind, actual, expected, 16.0))
        while len(pending) > choices.randint(0, 2 * SLOTS):
            compare()
    while pending:
        compare()
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    _check_runs_are_equal(group)
    _check_in_place(group)
    _check_whole_weights(group, torch.device("cuda"))


def _check_in_place(group: dist.ProcessGroup) -> None:
    """Gather into results that have this rank's part already, as FSDP does, on another stream than the default one."""
    by_copies, stream = copies.connected[group.group_name], torch.cuda.Stream()
    for repetition in range(3 * SLOTS):
        own = _random(1000 * group.rank() + repetition, 2048 + repetition).bfloat16()
        expected = finish(OPS.all_gather_into_tensor(own, group.size(), group.group_name))
        result = torch.full_like(expected, float("nan"))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            part = result.chunk(group.size())[group.rank()].copy_(own)
            by_copies.gather_into(result, part)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(result, expected)


def _check_whole_weights(group: dist.ProcessGroup, device: torch.device) -> None:
    """Renew weights three times, and wait for each group where it is used."""
    shards, place = group.size(), group.rank()
    shapes = {name: (rows, 7) if name != "gain" else (rows,) for name, rows in ROWS.items()}
    leaves = {name: torch.full(shape, float("nan"), device=device).bfloat16() for name, shape in shapes.items()}
    masters = {name: torch.empty(shape, device=device)[rows_of(shape[0], shards, place)].clone()
               for name, shape in shapes.items()}  # fmt: skip
    groups = [{name: leaves[name] for name in names} for names in (("gain", "even"), ("uneven", "one"))]
    whole, addresses = WholeWeights(groups, masters, [group] * 2), [leaf.data_ptr() for leaf in leaves.values()]
    for turn in range(3):
        draw = torch.Generator().manual_seed(turn)
        truth = {name: torch.randn(shape, generator=draw).to(device) for name, shape in shapes.items()}
        for name, master in masters.items():
            master.copy_(truth[name][rows_of(len(truth[name]), shards, place)])
        whole.renew()
        for number, some in enumerate(groups):
            whole.wait(number)
            for name, leaf in some.items():
                assert torch.equal(leaf, truth[name].bfloat16()), (turn, name)
    assert [leaf.data_ptr() for leaf in leaves.values()] == addresses


def _check_runs_are_equal(group: dist.ProcessGroup) -> None:
    x = _random(group.rank(), 4096, 2048).bfloat16()
    first = finish(start_reduce_scatter(x, group))
    for _ in range(20):
        assert torch.equal(finish(start_reduce_scatter(x, group)), first)


SHAPE = ModelConfig(
    num_layers=3, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=64
)


def _gradients(groups: ParallelGroups, compiled: bool, checkpointing: str) -> list[Tensor]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny.transformer(
        SHAPE,
        AttentionConfig(backend="sdpa"),
        vocab_size=1024,
        groups=groups,
        sequence_parallel=True,
        activation_checkpointing=checkpointing,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    if compiled:
        compile_blocks(model)
    for step in range(3):
        tokens = torch.randint(0, 1024, (2, 513), generator=torch.Generator().manual_seed(step)).cuda()
        _busy(random.Random(10 * step + groups.tp_rank).uniform(0, 2e-3))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    return [loss.detach().double(), *(p.grad.double() for p in model.parameters())]


def _check_model() -> None:
    """Compare copies in compiled blocks, and in eager blocks that are recomputed, with NCCL in compiled blocks."""
    groups = _join()
    group = groups.tp_group
    by_copies = copies.connected[group.group_name]
    ran = by_copies._count
    actual = [_gradients(groups, *case) for case in ((True, "none"), (False, "full"))]
    assert by_copies._count > ran
    saved = dict(copies.connected)
    copies.connected.clear()
    connect, copies.connect = copies.connect, lambda group: ""
    try:
        truth = _gradients(groups, True, "none")
    finally:
        copies.connected.update(saved)
        copies.connect = connect
    for case, tolerance in zip(actual, (0.02, 0.1), strict=True):  # Eager blocks round more often than fused ones.
        for ours, theirs in zip(case, truth, strict=True):
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("gpus", [2, 4])
def test_collectives_are_those_of_nccl(gpus: int) -> None:
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs, here are {GPUS}")
    run_distributed(_check_against_nccl, gpus)


@pytest.mark.long
def test_a_model_is_that_of_nccl() -> None:
    run_distributed(_check_model, 2)
