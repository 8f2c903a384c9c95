"""A micro-batch: what a rank's model is given of some samples.

The masks of the token files say which tokens count in the loss. A label that does not count is MASKED.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

MASKED = -100
"""The label of a token that does not count in the loss. torch.nn.functional.cross_entropy leaves out this label."""


@dataclass
class Sample:
    """One sequence: tokens int64 [seq_length + 1], and the positions in 1..seq_length-1 at which documents begin."""

    tokens: np.ndarray
    document_starts: list[int]
    source: int = 0
    """Index of the source that it is from."""
    counted: np.ndarray | None = None
    """bool [seq_length]: whether tokens[1:] count in the loss. None: all do."""


class Share(Protocol):
    """The share that a rank has of sequences."""

    @property
    def cp_size(self) -> int:
        """The number of ranks that share a sequence."""
        ...

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rank's tokens of whole sequences: [B, S, ...] -> [B, S / cp, ...]."""
        ...


@dataclass
class Batch:
    """One micro-batch of B sequences of S tokens, in CPU memory."""

    tokens: torch.Tensor
    """int64 [B, S]."""
    labels: torch.Tensor
    """int64 [B, S]: the token that follows each token, across document boundaries too. MASKED if it does not count."""
    positions: torch.Tensor | None
    """int64 [B, S]: positions, counted from 0 in each document. None: 0..S-1."""
    cu_seqlens: torch.Tensor | None
    """int32: the places in the flattened [B * S] tokens where documents begin, and their end. The last value is
    repeated up to a power of two (at least 16) entries, so that compiled code meets few shapes. None: attention crosses
    document boundaries."""
    max_seqlen: int | None
    """An upper bound of the tokens in the longest document: a power of two, or S. None where cu_seqlens is None."""
    sample_ids: list[int]
    """Global indices of the sequences."""
    sources: list[int] = field(default_factory=list)
    """For each sequence, the index of the source that it is from."""
    weight: int | None = None
    """Number of sequences that count in an evaluation: the first ones, or all (None). The others keep this rank in step
    with the other ranks."""
    divisor: float | None = None
    """The loss is the sum over the labels that are not MASKED, divided by this number. It is the number of those
    labels, unless a step says otherwise. None: no label can be MASKED, and the loss is the mean."""

    @property
    def span(self) -> float:
        """The sum of the squared lengths of the documents that attention stays within, divided by the number of
        tokens."""
        if self.cu_seqlens is None:
            return float(self.tokens.shape[1])
        return self.cu_seqlens.diff().double().square().sum().item() / self.tokens.numel()

    def inputs(self, device: torch.device, share: Share | None = None) -> dict[str, Any]:
        """Return the arguments of Transformer.forward on `device`, by name. Attention sees whole sequences: cu_seqlens
        and max_seqlen are those of the whole batch. `share` is the rank's share of each sequence, as ParallelGroups has
        it. None: all of it."""

        def there(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None or torch.device(device).type == "cpu":
                return x
            # A copy waits for all pending work of the GPU unless it is from pinned memory. torch keeps the memory until
            # the copy is made.
            return x.pin_memory().to(device, non_blocking=True)

        def own(x: torch.Tensor | None) -> torch.Tensor | None:
            return there(x if x is None or share is None else share.own_tokens(x))

        made = {
            "tokens": own(self.tokens),
            "labels": own(self.labels),
            "positions": own(self.positions),
            "cu_seqlens": there(self.cu_seqlens),
            "max_seqlen": self.max_seqlen,
        }
        if self.divisor is not None:
            # A number would be a part of the program of a micro-step, and the program stays the same if this changes.
            slices = 1 if share is None else share.cp_size
            made["divisor"] = there(torch.tensor(self.divisor / slices, dtype=torch.float32))
        return made


def batch_of(
    samples: Sequence[Sample],
    document_attention: bool,
    document_positions: bool,
    *,
    ids: Sequence[int] = (),
    weight: int | None = None,
) -> Batch:
    """Build a micro-batch from samples of one length.

    Args:
        document_attention: whether attention stays within documents (cu_seqlens).
        document_positions: whether positions restart at each document.
        ids: global indices of the sequences.
        weight: number of sequences that count in an evaluation.
    """
    rows = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    seq_length = rows.shape[1] - 1
    starts = [row * seq_length + begin for row, sample in enumerate(samples) for begin in (0, *sample.document_starts)]
    bounds = np.array([*starts, len(samples) * seq_length])
    positions = cu_seqlens = max_seqlen = None
    if document_positions:
        flat = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        positions = torch.from_numpy(flat.reshape(len(samples), seq_length))
    if document_attention:
        padded = np.full(_power_of_two(max(len(bounds), 16)), bounds[-1], dtype=np.int32)
        padded[: len(bounds)] = bounds
        cu_seqlens = torch.from_numpy(padded)
        max_seqlen = min(_power_of_two(int(np.diff(bounds).max())), seq_length)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    divisor = None
    if any(sample.counted is not None for sample in samples):
        every = np.ones(seq_length, dtype=bool)
        counted = np.stack([every if sample.counted is None else sample.counted for sample in samples])
        labels = labels.masked_fill(torch.from_numpy(~counted), MASKED)
        divisor = max(1.0, float(counted.sum()))
    sources = [sample.source for sample in samples]
    return Batch(tokens, labels, positions, cu_seqlens, max_seqlen, list(ids), sources, weight, divisor)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
