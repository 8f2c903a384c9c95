"""The end of the decoder: logits or losses, from the output of the final norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Pending, linear
from sagetrain.parallel.collectives import Region, finish_enter, gather_from_region
from sagetrain.parallel.cross_entropy import OwnLoss, is_by_sequence, linear_cross_entropy, linear_token_losses
from sagetrain.parallel.layers import ParallelLayer


class Head(ParallelLayer):
    """Output projection and loss, with the vocabulary spread over the tensor-parallel group.

    With tied embeddings, the one Parameter is registered here and in the embedding.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        region: Region,
        *,
        known: int | None = None,
        matmul: Matmul | None = None,
        loss: OwnLoss | None = None,
    ) -> None:
        super().__init__(Matmul(), matmul)
        self.loss = loss
        """A user's loss in the place of the cross-entropy, or None. Losses by token stay cross-entropies."""
        self.weight = weight
        self.known = known
        self.region = region
        self.compiled = False

    @property
    def weights(self) -> list[Tensor]:
        """The matrix."""
        return [self.weight]

    @property
    def matmuls(self) -> dict[str, Matmul]:
        """The Matmul of the head, as `head`, unless it multiplies in the dtype of its operands. It may be set."""
        return {} if self.matmul is self.in_dtype else {"head": self.matmul}

    @matmuls.setter
    def matmuls(self, matmuls: Mapping[str, Matmul]) -> None:
        self.matmul, self.kept = matmuls.get("head") or self.in_dtype, ()

    @property
    def by_sequence(self) -> bool:
        """Whether the loss sees whole sequences."""
        return is_by_sequence(self.loss)

    def forward(
        self,
        halves: Sequence[Tensor | Pending],
        labels_T: Tensor | None,
        divisor: Tensor | float | None = None,
        by_token: bool = False,
        every: int = 1,
    ) -> Tensor:
        """Return the loss, the loss of each token, or logits.

        Args:
            halves: outputs of start_enter, [tokens, hidden] each, which are joined.
            labels_T: int64 [tokens], or [sequences, tokens] for a loss by sequence. None: return logits.
            divisor: see linear_cross_entropy.
            by_token: return the losses of linear_token_losses.
            every: return the logits of every so-many-th token alone, of the last token of each sequence for example.

        Returns:
            fp32 scalar, fp32 [tokens] by token, or logits [tokens / every, vocab].
        """
        entered = [finish_enter(half, self.region) for half in halves]
        x_TD = entered[0] if len(entered) == 1 else torch.cat(entered)
        if labels_T is None:
            x_TD = x_TD[every - 1 :: every]
            return gather_from_region(linear(x_TD, self.weights, self.matmul, kept=self.kept)[0], self.region.groups)
        read = x_TD, self.weight, labels_T, self.region.groups
        how: dict[str, Any] = {"matmul": self.matmul, "kept": self.kept, "compiled": self.compiled, "known": self.known}
        if by_token:
            return linear_token_losses(*read, **how)
        return linear_cross_entropy(*read, divisor=divisor, loss=self.loss, **how)
