"""Collectives and sharded layers agree with their dense twins, forward and gradients, in float64 on gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distributed import run_distributed
from sagetrain.parallel.collectives import (
    Region,
    finish_enter,
    finish_leave,
    gather_from_region,
    reduce_from_region,
    start_enter,
    start_leave,
)
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard
from sagetrain.parallel.topology import ParallelGroups, Topology

TOKENS, HIDDEN, INNER, VOCAB = 12, 8, 16, 24


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _groups() -> ParallelGroups:
    return ParallelGroups.create(Topology(dist.get_world_size(), dist.get_world_size()))


def _fill(weight: Tensor, full: Tensor, dim: int, groups: ParallelGroups) -> None:
    with torch.no_grad():
        weight.copy_(shard(full, dim, groups))


def _check_collectives() -> None:
    """Check each pair as an adjoint: <f(x), g> summed over the ranks equals <x, f'(g)> summed over the ranks. x and g
    differ on every rank where the function allows it. f itself is checked by its definition."""
    groups = _groups()
    size, rank = groups.tp_size, groups.tp_rank
    xs = [_random(r, TOKENS, HIDDEN) for r in range(size)]
    gs = [_random(100 + r, TOKENS, HIDDEN) for r in range(size)]
    own = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)

    x = _leaf(xs[0])
    y = finish_enter(start_enter(x, Region(groups)), Region(groups))
    y.backward(gs[rank])
    _close(y, xs[0])
    _close(x.grad, sum(gs))

    x = _leaf(xs[rank])
    y = reduce_from_region(x, groups)
    y.backward(gs[0])
    _close(y, sum(xs))
    _close(x.grad, gs[0])

    x = _leaf(xs[rank])
    y = gather_from_region(x, groups)
    g = _random(9, TOKENS, HIDDEN * size)
    y.backward(g)
    _close(y, torch.cat(xs, -1))
    _close(x.grad, g[:, rank * HIDDEN : (rank + 1) * HIDDEN])

    x = _leaf(xs[0][own])
    y = finish_enter(start_enter(x, Region(groups, True)), Region(groups, True))
    y.backward(gs[rank])
    _close(y, xs[0])
    _close(x.grad, sum(gs)[own])

    x = _leaf(xs[rank])
    y = finish_leave(start_leave(x, Region(groups, True)), Region(groups, True))
    y.backward(gs[0][own])
    _close(y, sum(xs)[own])
    _close(x.grad, gs[0])

    # Inputs and gradients are strided. The backend's collectives do not take these as they are.
    x = _leaf(xs[rank].t())
    y = reduce_from_region(x, groups)
    (y * gs[0].t()).sum().backward()
    _close(x.grad, gs[0].t())
    x = _leaf(xs[0])
    y = finish_enter(start_enter(x, Region(groups)), Region(groups))
    y.sum().backward()  # The gradient is an expanded scalar.
    _close(x.grad, torch.full_like(x, size))


def _check_mlp(sequence_parallel: bool) -> None:
    """Check a column-parallel layer followed by a row-parallel layer, as in the model: the result must equal dense
    matmuls."""
    groups = _groups()
    a, b, c = _random(1, INNER, HIDDEN), _random(2, HIDDEN, INNER), _random(7, INNER, HIDDEN)
    x_full, g_full = _random(3, TOKENS, HIDDEN), _random(4, TOKENS, HIDDEN)

    x_dense, a_dense, b_dense, c_dense = _leaf(x_full), _leaf(a), _leaf(b), _leaf(c)
    y_dense = F.linear(torch.tanh(F.linear(x_dense, a_dense)) * F.linear(x_dense, c_dense), b_dense)
    y_dense.backward(g_full)

    region = Region(groups, sequence_parallel, torch.float64)
    column = ColumnParallelLinear(HIDDEN, {"a": INNER, "c": INNER}, region)
    row = RowParallelLinear(INNER, HIDDEN, region)
    _fill(column.a, a, 0, groups)
    _fill(column.c, c, 0, groups)
    _fill(row.weight, b, 1, groups)
    tokens = shard(torch.arange(TOKENS), 0 if sequence_parallel else None, groups)
    x = _leaf(x_full[tokens])
    left, right = column(start_enter(x, region))
    y = finish_leave(row(torch.tanh(left) * right), region)
    y.backward(g_full[tokens])

    _close(y, y_dense[tokens])
    _close(x.grad, x_dense.grad[tokens])
    _close(column.a.grad, shard(a_dense.grad, 0, groups))
    _close(column.c.grad, shard(c_dense.grad, 0, groups))
    _close(row.weight.grad, shard(b_dense.grad, 1, groups))


def _check_embedding(sequence_parallel: bool) -> None:
    groups = _groups()
    table, g_full = _random(5, VOCAB, HIDDEN), _random(6, TOKENS, HIDDEN)
    # The ids cover both ends, repeats and every shard.
    ids = torch.tensor([0, VOCAB - 1, 3, 3, 3, 11, 12, 13, 23, 0, 7, 20])
    dense = _leaf(table)
    y_dense = F.embedding(ids, dense)
    y_dense.backward(g_full)

    region = Region(groups, sequence_parallel, torch.float64)
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, region)
    _fill(layer.weight, table, 0, groups)
    tokens = shard(torch.arange(TOKENS), 0 if sequence_parallel else None, groups)
    y = finish_leave(layer(ids), region)
    y.backward(g_full[tokens])
    _close(y, y_dense[tokens])
    _close(layer.weight.grad, shard(dense.grad, 0, groups))


def _check_everything() -> None:
    _check_collectives()
    for sequence_parallel in (False, True):
        _check_mlp(sequence_parallel)
        _check_embedding(sequence_parallel)
    with pytest.raises(ValueError, match=r"out_features of a \(9\) is not a multiple of tensor_parallel_size"):
        ColumnParallelLinear(HIDDEN, {"a": 9}, Region(_groups()))
    region = Region(_groups(), sharded=True)
    assert len(finish_leave(start_leave(torch.ones(4, 2), region), region)) == 4 // dist.get_world_size()


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_layers_equal_dense(world_size: int) -> None:
    run_distributed(_check_everything, world_size)


def test_group_of_one_leaves_tensors_alone() -> None:
    groups, x = ParallelGroups.single(), torch.randn(4, 4)
    for function in (reduce_from_region, gather_from_region):
        assert function(x, groups) is x
    for function in (start_enter, finish_enter, start_leave, finish_leave):
        assert function(x, Region(groups, True)) is x and function(x, Region(groups)) is x


def test_a_shard_is_a_slice_along_the_dim_that_is_cut() -> None:
    groups = ParallelGroups(Topology(4, 4), rank=1)
    full = torch.arange(8).view(2, 4)
    assert shard(full, 1, groups).tolist() == [[1], [5]]
    assert shard(full, None, groups) is full


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gradients_of_weights_with_one_x_are_joined(tp_size: int) -> None:
    """Tensor parallelism makes the matmuls thin. Elsewhere joining the gradients would only cost copies."""
    groups = ParallelGroups(Topology(tp_size, tp_size), rank=0)
    layer = ColumnParallelLinear(HIDDEN, {"a": INNER, "b": INNER}, Region(groups))
    assert layer.matmul.joined == (tp_size == 2)
