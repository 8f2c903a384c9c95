"""The kinds of operations that costs/operations.py lists. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar


class Precision(NamedTuple):
    """The arithmetic of a linear layer's three matmuls, as names of Hardware.precisions."""

    forward: str
    input_gradient: str
    weight_gradient: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One entry of the list. It runs once forward and once backward in a micro-step."""

    name: str
    saved: int = 0
    """The bytes that autograd keeps from forward to backward, for each token that the operation has on this rank.
    The rank has a shard of the tokens where these are sharded."""
    shards: int = 1
    """The number of ranks among which the saved tokens are sharded."""
    recomputed: bool = False
    """Whether the operation runs forward once more, in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class MatmulCost(Operation):
    """A linear layer, [tokens, inputs] x [inputs, outputs]. Backward it is two matmuls of the same size."""

    tokens: int
    outputs: int
    inputs: int
    precision: Precision
    column_parallel: bool
    """Whether the outputs are split, so that the gradients of the inputs are summed up over the ranks."""
    experts: int = 1
    """The number of weights of these sizes. Each of them multiplies an equal share of the tokens."""

    @property
    def weights(self) -> int:
        """The number of parameters on this rank."""
        return self.experts * self.outputs * self.inputs

    @property
    def flops(self) -> int:
        """The FLOPs of one of the three matmuls."""
        return 2 * self.tokens * self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class AttentionCost(Operation):
    """Causal attention, softmax(q k^T) v: 2 matmuls forward, 5 backward (one of them a recomputation)."""

    tokens: int
    heads: int
    head_dim: int
    span: float
    """The span of the sequences or documents, see Rank.span."""
    documents: bool
    """Whether attention stays within documents, whatever their lengths."""
    backends: tuple[str, ...]
    """The names of Hardware.attention that may run. Where the run decides between several (`auto`), the fastest
    counts."""
    precision: str

    @property
    def flops(self) -> float:
        """The FLOPs of one matmul, over half of the square."""
        return self.tokens * self.span * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class PassCost(Operation):
    """Kernels that only move data: norms, rotary embedding, SwiGLU, residual stream, softmax of the loss."""

    moved: float
    """The bytes per token of the rank that are read and written, forward and backward together."""
    live: int = 0
    """The bytes per token that exist while the pass runs, beside the saved ones."""


_Operation = TypeVar("_Operation", bound=Operation)


def of_kind(kind: type[_Operation], operations: Iterable[Operation]) -> list[_Operation]:
    """Return the operations of one class, matmuls for example."""
    return [operation for operation in operations if isinstance(operation, kind)]
