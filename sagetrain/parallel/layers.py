"""Tensor-parallel layers in Megatron's manner: linear layers split by column or row, and the embedding split by
vocabulary.

Weights are [out_features, in_features]. A layer allocates its slice of each weight, and the model fills
it (see `shard` and model/transformer.py), so that the values do not depend on the layout. model/tensors.py says which
dim of which weight is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Measured, Pending, gated_linear, linear, normed_linear
from sagetrain.parallel.collectives import Region, start_leave
from sagetrain.parallel.topology import ParallelGroups


@torch.no_grad()
def materialize(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a Parameter on the meta device hold values of its shape and dtype. The Parameter stays the same object,
    because a model with tied embeddings refers to it twice."""
    torch.utils.swap_tensors(parameter, nn.Parameter(values))


def shard(full: Tensor, dim: int | None, groups: ParallelGroups) -> Tensor:
    """Return this rank's slice of a whole tensor, cut along `dim`, as a view."""
    return full if dim is None else full.chunk(groups.tp_size, dim)[groups.tp_rank]


def _divide(total: int, groups: ParallelGroups, what: str) -> int:
    if total % groups.tp_size:
        raise ValueError(f"{what} ({total}) is not a multiple of tensor_parallel_size ({groups.tp_size})")
    return total // groups.tp_size


_M = TypeVar("_M")


class LinearLayer(nn.Module, Generic[_M]):
    """A layer that multiplies by a value that decides about rounding, and keeps what that value keeps of its
    weights.

    Args:
        in_dtype: the Matmul of the layer unless it is told otherwise.
        matmul: how the layer multiplies (default: in_dtype).
    """

    def __init__(self, in_dtype: _M, matmul: _M | None) -> None:
        super().__init__()
        self.in_dtype: _M = in_dtype
        self.matmul: _M = matmul or in_dtype
        self.kept: tuple[Tensor, ...] = ()
        """The tensors that `keep` made. They are no buffers, because DeepSpeed would cast buffers."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """The matrices, in the order of the outputs."""
        raise NotImplementedError

    def keep(self) -> None:
        """Make the tensors that the layer keeps of its weights, from the weights as they are now."""
        raise NotImplementedError


class ParallelLayer(LinearLayer[Matmul]):
    """A linear layer that is spread over the tensor-parallel group."""

    def keep(self) -> None:
        """Make the tensors that the layer keeps of its weights, from the weights as they are now."""
        self.kept = self.matmul.keep(self.weights)


def linear_layers(model: nn.Module) -> Iterator[LinearLayer[Any]]:
    """Yield the layers of a model that multiply by a Matmul, experts included."""
    return (layer for layer in model.modules() if isinstance(layer, LinearLayer))


@torch.no_grad()
def keep_weights(model: nn.Module) -> None:
    """Make the tensors that layers keep of their weights (Matmul.keep), from the weights as they are now.

    From then on the layers compute with the kept tensors, so whoever changes a weight has to call this again. It is not
    for ZeRO 3, where weights come and go.
    """
    for layer in linear_layers(model):
        layer.keep()


class ColumnParallelLinear(ParallelLayer):
    """Several y = x W^T of one x. The rows of each W, which are its output features, are spread over the group. Raises
    ValueError if tensor_parallel_size does not divide a number of output features.

    x comes from `start_enter`. Matrices that read the same x (q, k and v; gate and up) are one layer, because they
    share a collective forward and one backward. An x that is a tensor has entered already (`finish_enter`).

    Args:
        out_features: the name of each weight and its number of output features, in the order of the outputs.
        bias: add a bias to each output, which is cut as the rows of its weight are.
        matmul: how the layer multiplies (default: in the dtype of its operands, gradients joined under tensor
            parallelism).
    """

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        region: Region,
        *,
        bias: bool = False,
        matmul: Matmul | None = None,
    ) -> None:
        super().__init__(Matmul(joined=region.groups.tp_size > 1), matmul)
        self.region = region
        self.bias = bias
        self.names = tuple(out_features)
        for name, size in out_features.items():
            local = _divide(size, region.groups, f"out_features of {name}")
            self.register_parameter(name, region.parameter(local, in_features))
            if bias:
                self.register_parameter(f"{name}_bias", region.parameter(local))

    @property
    def weights(self) -> list[Tensor]:
        """The matrices, in the order of the outputs."""
        return [getattr(self, name) for name in self.names]

    def forward(self, x: Tensor | Measured | Pending) -> tuple[Tensor, ...]:
        """Multiply x [tokens, in], and return [tokens, out / tp] for each weight."""
        outputs = linear(x, *self._how(x))
        if self.bias:
            outputs = tuple(y + getattr(self, f"{name}_bias") for name, y in zip(self.names, outputs, strict=True))
        return outputs

    def gated(self, x: Tensor | Measured | Pending) -> Tensor | Measured:
        """Return silu(gate) * up of the layer's two products, [tokens, out / tp], for a row-parallel layer. The layer
        has no bias."""
        return gated_linear(x, *self._how(x))

    def _how(self, x: Tensor | Measured | Pending) -> tuple[Any, ...]:
        """Return the arguments of `linear` that are not x."""
        groups = self.region.groups
        back = None if groups.tp_size == 1 or isinstance(x, Tensor) else self.region.entering[1]
        return self.weights, self.matmul, back, groups.tp_group, self.kept


class RowParallelLinear(ParallelLayer):
    """One y = x W^T. The columns of W, which are its input features, are spread over the group. Raises ValueError if
    tensor_parallel_size does not divide in_features.

    The layer starts to add the partial sums over the group: for all ranks, or for each rank its shard of the tokens.
    `finish_leave` finishes the sum.

    Args:
        bias: add a bias to the sum, which every rank has whole.
        matmul: how the layer multiplies (default: in the dtype of its operands).
    """

    def __init__(
        self, in_features: int, out_features: int, region: Region, *, bias: bool = False, matmul: Matmul | None = None
    ) -> None:
        super().__init__(Matmul(), matmul)
        self.region = region
        local = _divide(in_features, region.groups, "in_features")
        self.weight = region.parameter(out_features, local)
        self.bias = region.parameter(out_features) if bias else None

    @property
    def weights(self) -> list[Tensor]:
        """The matrix."""
        return [self.weight]

    def forward(self, x: Tensor | Measured) -> Tensor | Pending:
        """Multiply x [tokens, in / tp], and start to sum up [tokens (/ tp with sequence parallelism), out]."""
        (y,) = linear(x, [self.weight], self.matmul, kept=self.kept)
        if self.bias is None:
            return start_leave(y, self.region, packed=self.matmul.gradient_travels)
        # The first rank adds the bias to the sum, the others add zeros. Each of them gets the gradient of all tokens.
        y = y + (self.bias if self.region.groups.tp_rank == 0 else self.bias - self.bias.detach())
        return start_leave(y, self.region)

    def normed(self, x: Tensor | Measured, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Measured]:
        """Multiply x on a group of one rank without a bias, add the stream, and normalize the sum. Return the sum and
        its norm."""
        return normed_linear(x, self.weight, self.matmul, stream, gain, eps, self.kept)


class VocabParallelEmbedding(nn.Module):
    """An embedding lookup with the rows of the table spread over the group. `finish_leave` finishes it. Raises
    ValueError if tensor_parallel_size does not divide vocab_size.

    Args:
        scaled: multiply the rows by sqrt(hidden_size), which is rounded to their dtype.
    """

    def __init__(self, vocab_size: int, hidden_size: int, region: Region, *, scaled: bool = False) -> None:
        super().__init__()
        self.region = region
        self._scale = float(torch.tensor(hidden_size**0.5).to(region.dtype)) if scaled else None
        local = _divide(vocab_size, region.groups, "vocab_size")
        self.weight = region.parameter(local, hidden_size)

    def forward(self, tokens: Tensor) -> Tensor | Pending:
        """Look up tokens, int64 [tokens], and start to sum up [tokens (/ tp with sequence parallelism), hidden]."""
        if self.region.groups.tp_size == 1:
            return self._scaled(F.embedding(tokens, self.weight))
        local, outside = local_ids(tokens, self.weight.shape[0], self.region.groups)
        rows = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return start_leave(self._scaled(rows), self.region)

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self._scale is None else rows * self._scale


def local_ids(ids: Tensor, local_size: int, groups: ParallelGroups) -> tuple[Tensor, Tensor]:
    """Return vocabulary ids relative to this rank's first row, and a mask of the ids on other ranks. Those ids become
    0."""
    local = ids - groups.tp_rank * local_size
    outside = (local < 0) | (local >= local_size)
    return local.masked_fill(outside, 0), outside
