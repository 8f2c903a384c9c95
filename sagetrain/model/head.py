"""The end of the decoder: logits or losses, from what the final norm returned."""

from __future__ import annotations

from torch import Tensor, nn

from sagetrain.parallel.collectives import Pending, finish_enter, gather_from_region
from sagetrain.parallel.cross_entropy import linear_cross_entropy, linear_token_losses
from sagetrain.parallel.matmul import Matmul, linear
from sagetrain.parallel.topology import ParallelGroups


class Head(nn.Module):
    """Output projection and loss, the vocabulary spread over the tensor-parallel group.

    Tied embeddings: the one Parameter is registered here and in the embedding, so that each module owns the weight
    that its forward reads. ZeRO-3 gathers exactly what the running module owns.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        known: int | None = None,
        matmul: Matmul | None = None,
    ) -> None:
        super().__init__()
        self.matmul = matmul or Matmul()
        self.weight = weight
        self.known = known
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        self.compiled = False

    def forward(
        self,
        x: Tensor | Pending,
        labels_T: Tensor | None,
        divisor: float | None = None,
        by_token: bool = False,
        every: int = 1,
    ) -> Tensor:
        """[tokens, hidden], of start_enter -> loss, as of linear_cross_entropy, or fp32 [tokens] by token; without
        labels -> logits [tokens / every, vocab], of the last of so many tokens each."""
        x_TD = finish_enter(x, self.groups, self.sequence_parallel)
        if labels_T is None:
            x_TD = x_TD[every - 1 :: every]
            return gather_from_region(linear(x_TD, [self.weight], self.matmul)[0], self.groups)
        if by_token:
            return linear_token_losses(
                x_TD, self.weight, labels_T, self.groups, matmul=self.matmul, compiled=self.compiled, known=self.known
            )
        return linear_cross_entropy(
            x_TD,
            self.weight,
            labels_T,
            self.groups,
            divisor=divisor,
            matmul=self.matmul,
            compiled=self.compiled,
            known=self.known,
        )
