"""A second recipe of matmuls: every layer takes its three products from the value that it was given, at any layout."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distributed import run_distributed
from sagekernels.matmul import Matmul
from sagetrain.model.head import Head
from sagetrain.parallel.collectives import Region, finish_leave, start_enter
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear, shard
from sagetrain.parallel.topology import ParallelGroups, Topology

TOKENS, HIDDEN, INNER, VOCAB = 12, 8, 16, 24
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 8, 16, 32
"""The operands of each product are multiples of one over this."""


def _rounded(steps: int, *operands: Tensor) -> list[Tensor]:
    return [torch.round(x * steps) / steps for x in operands]


class Rounding(Matmul):
    """An example of a recipe in fewer bits: the same products of rounded operands."""

    def read(self, x: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return _rounded(FORWARD, x), _rounded(WEIGHT_GRADIENT, x)

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        return super().forward(operand, _rounded(FORWARD, *weights))

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        return super().input_gradient(_rounded(INPUT_GRADIENT, *prepared), _rounded(INPUT_GRADIENT, *weights), out)

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return super().weight_gradients(_rounded(WEIGHT_GRADIENT, *prepared), saved, weights)

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        super().add_weight_gradient(total, _rounded(WEIGHT_GRADIENT, *prepared), saved)


class Dense(torch.autograd.Function):
    """Compute y = x W^T on one rank, written out, with operands rounded as Rounding does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        x, weight = _rounded(FORWARD, x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        (g, w), (h, y) = _rounded(INPUT_GRADIENT, grad, weight), _rounded(WEIGHT_GRADIENT, grad, x)
        return g @ w, h.t() @ y


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _leaf(seed: int, *shape: int) -> Tensor:
    return _random(seed, *shape).requires_grad_()


def _close(actual: Tensor, expected: Tensor, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def _layers(region: Region, joined: bool) -> nn.ModuleDict:
    """Return one layer of each kind, each with a value of its own."""
    region = region._replace(dtype=torch.float64)
    column = ColumnParallelLinear(HIDDEN, {"a": INNER, "c": INNER}, region, matmul=Rounding(joined))
    row = RowParallelLinear(INNER, HIDDEN, region, matmul=Rounding(joined))
    weight = nn.Parameter(torch.empty(VOCAB // region.groups.tp_size, HIDDEN).double())
    head = Head(weight, region, matmul=Rounding(joined))
    layers = nn.ModuleDict({"column": column, "row": row, "head": head})
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layers.named_parameters()):
            shape = {"column": (INNER, HIDDEN), "row": (HIDDEN, INNER), "head": (VOCAB, HIDDEN)}[name.split(".")[0]]
            parameter.copy_(shard(_random(seed, *shape), int(name.startswith("row.")), region.groups))
    return layers


def _check_layers(region: Region, joined: bool) -> None:
    """Compare a column-parallel layer, a product and a row-parallel layer with the same on one rank."""
    layers = _layers(region, joined)
    tokens = shard(torch.arange(TOKENS), 0 if region.sharded else None, region.groups)
    x, g = _random(9, TOKENS, HIDDEN), _random(10, TOKENS, HIDDEN)
    own = x[tokens].requires_grad_()
    left, right = layers["column"](start_enter(own, region))
    y = finish_leave(layers["row"](torch.tanh(left) * right), region)
    y.backward(g[tokens])

    a, c, b = weights = [_leaf(0, INNER, HIDDEN), _leaf(1, INNER, HIDDEN), _leaf(2, HIDDEN, INNER)]
    x.requires_grad_()
    truth = Dense.apply(torch.tanh(Dense.apply(x, a)) * Dense.apply(x, c), b)
    truth.backward(g)
    _close(y, truth[tokens])
    _close(own.grad, x.grad[tokens])
    parameters = [*layers["column"].parameters(), layers["row"].weight]
    for dim, dense, parameter in zip((0, 0, 1), weights, parameters, strict=True):
        _close(parameter.grad, shard(dense.grad, dim, region.groups))


def _check_head(region: Region, labels: Tensor | None) -> None:
    """Compare the loss of the head, or its logits."""
    head = _layers(region, False)["head"]
    tokens = shard(torch.arange(TOKENS), 0 if region.sharded else None, region.groups)
    x, weight = _random(9, TOKENS, HIDDEN), _leaf(3, VOCAB, HIDDEN)
    own = x[tokens].requires_grad_()
    out = head([start_enter(own, region)], labels)
    out.sum().backward()

    logits = Dense.apply(x.requires_grad_(), weight)
    if labels is None:
        scale, close, truth = 1, {}, logits
    else:  # The loss is divided by the tokens at the very end, so softmax - one_hot is what is rounded, in fp32.
        scale, close, truth = TOKENS, {"rtol": 1e-5, "atol": 1e-6}, F.cross_entropy(logits, labels, reduction="sum")
    truth.sum().backward()
    _close(out.double(), truth / scale, **close)
    _close(own.grad, x.grad[tokens] / scale, **close)
    _close(head.weight.grad, shard(weight.grad, 0, region.groups) / scale, **close)


def _check_all(groups: ParallelGroups) -> None:
    for region in (Region(groups), Region(groups, sharded=True))[: groups.tp_size]:
        for joined in (False, True):
            _check_layers(region, joined)
        _check_head(region, torch.arange(TOKENS) * 2 % VOCAB)
        _check_head(region, None)
        _check_compiled(region)


class Layer(nn.Module):
    """Column-parallel, then row-parallel weights, compiled like a block: one code for all layers, a value for each."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region, self.layers = region, _layers(region, False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.layers["column"](start_enter(x, self.region))
        return finish_leave(self.layers["row"](left * right), self.region)


def _check_compiled(region: Region) -> None:
    """Check that there is one graph for training and one for evaluation, however many layers and values there are."""
    torch._dynamo.reset()
    network = nn.Sequential(*(Layer(region) for _ in range(4)))
    x = 0.1 * _random(9, TOKENS, HIDDEN)
    results = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.utils.counters.clear()
            for layer in network:
                layer.compile(fullgraph=True, backend="aot_eager")
        y = network(x.clone().requires_grad_())
        (y / y.detach().abs().max()).sum().backward()
        with torch.no_grad():
            results.append([y.detach(), network(x), *(p.grad for p in network.parameters() if p.grad is not None)])
        network.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def _check_two_ranks() -> None:
    _check_all(ParallelGroups.create(Topology(dist.get_world_size(), dist.get_world_size())))


def test_every_layer_multiplies_as_its_value_says() -> None:
    _check_all(ParallelGroups.single())


def test_two_tensor_parallel_ranks_multiply_as_their_values_say() -> None:
    run_distributed(_check_two_ranks, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_autograd_bit_for_bit(dtype: torch.dtype) -> None:
    """If products of one input are not joined, they are added in the order in which autograd adds those of separate
    linear layers."""
    region = Region(ParallelGroups.single(), dtype=dtype)
    layer = ColumnParallelLinear(HIDDEN, {"q": 16, "k": 8, "v": 8}, region)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(_random(seed, *parameter.shape))
    grads = [_random(7 + i, TOKENS, size).to(dtype) for i, size in enumerate((16, 8, 8))]
    results = []
    for apply in (layer, lambda x: tuple(F.linear(x, weight) for weight in layer.parameters())):
        x = _random(3, TOKENS, HIDDEN).to(dtype).requires_grad_()
        outputs = apply(x)
        results.append([*outputs, *torch.autograd.grad(outputs, (x, *layer.parameters()), grads)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
