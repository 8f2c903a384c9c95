"""Score continuations: how likely a model finds each of many texts. They are packed as documents into sequences of one
length.

A model in training is therefore called in the shape that it is compiled for, at any layout, and short texts cost
little. Texts that are longer than data.seq_length are rare: only fine-tuning has a context beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.config.errors import ConfigError
from sagetrain.data.batch import Batch, Sample, batch_of
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.load import TrainedRun
from sagetrain.parallel.topology import ParallelGroups

_ROW, _PASS = 2048, 8192
"""The largest number of tokens in a sequence and in a pass of a checkpoint's model, if no text is longer."""
Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, and the tokens of what follows it."""


@dataclass(frozen=True)
class Scorer:
    """Compute log-likelihoods with a model that all ranks of `groups` hold together. All ranks call it with the same
    pairs."""

    forward: Callable[[Batch], Tensor]
    """Return logits [B, S (/ cp), vocabulary or more] of a micro-batch, whose labels have no meaning. Collective."""
    groups: ParallelGroups
    device: torch.device
    seq_length: int
    """The length of the sequences that texts are packed into. A longer text doubles it until the text has room."""
    micro_batch_size: int
    vocab_size: int
    context: int
    """The number of tokens that the model reads at once."""

    @torch.no_grad()
    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return for each pair log p(continuation | context), in nats, and whether every token of it was the most
        likely one. If a text is longer than the context, the beginning of it is left out. Raises ConfigError if a
        continuation is."""
        for _, continuation in pairs:
            if len(continuation) > self.context:
                raise ConfigError(
                    f"a text of {len(continuation):,} tokens is to be scored at once, more than the context of "
                    f"{self.context:,} that the model was trained with (its longest data.seq_length)"
                )
        texts = [[*context, *continuation][-self.context - 1 :] for context, continuation in pairs]
        length = self.seq_length
        while length < max(map(len, texts), default=0) - 1:
            length *= 2
        shape = max(1, self.micro_batch_size * self.seq_length // length), length
        # The second column counts the tokens that are not the most likely ones.
        found = torch.zeros(len(pairs), 2, dtype=torch.float64, device=self.device)
        rows, scored = list(_packed([len(text) - 1 for text in texts], length)), [len(pair[1]) for pair in pairs]
        for first in range(0, len(rows), shape[0] * self.groups.dp_size):
            begin = first + self.groups.dp_rank * shape[0]
            self._add(found, rows[begin : begin + shape[0]], shape, texts, scored)
        if self.groups.tp_rank or self.groups.pp_rank:
            found.zero_()  # The first rank of the model's tensor-parallel group and pipeline has found the same.
        if dist.is_initialized():
            dist.all_reduce(found)
        return [(total, not wrong) for total, wrong in found.tolist()]

    def _add(
        self, found: Tensor, rows: list[list[int]], shape: tuple[int, int], texts: list[list[int]], scored: list[int]
    ) -> None:
        """Score one micro-batch of this shape. The rows of texts may not fill it."""
        tokens = np.zeros((shape[0], shape[1] + 1), dtype=np.int64)
        labels, owners = np.zeros(shape, dtype=np.int64), np.full(shape, -1)
        begins: list[list[int]] = [[] for _ in range(shape[0])]
        for row, members in enumerate(rows):
            end = 0
            for number in members:
                text, begin = texts[number], end
                end += len(text) - 1
                begins[row] += [begin] * (begin > 0)
                tokens[row, begin:end], labels[row, begin:end] = text[:-1], text[1:]
                owners[row, max(begin, end - scored[number]) : end] = number
            # The padding is a document too.
            begins[row] += [end] * (0 < end < shape[1])
        samples = [Sample(*each) for each in zip(tokens, begins, strict=True)]
        logits = self.forward(batch_of(samples, True, True))
        own_labels, own_owners = (self.groups.own_tokens(torch.from_numpy(x)).numpy() for x in (labels, owners))
        for row_logits, row_labels, row_owners in zip(logits, own_labels, own_owners, strict=True):
            (places,) = np.nonzero(row_owners >= 0)
            if len(places):
                wanted = torch.from_numpy(row_labels[places]).to(self.device)
                chosen = row_logits[torch.from_numpy(places).to(self.device), : self.vocab_size].float()
                likely = chosen.log_softmax(-1).gather(-1, wanted[:, None])[:, 0].double()
                numbers = torch.stack([likely, (chosen.argmax(-1) != wanted).double()], 1)
                found.index_add_(0, torch.from_numpy(row_owners[places]).to(self.device), numbers)


def encoded_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Return the tokens of a context, as it has them alone, and those of what follows it. Raises ConfigError if they
    are not valid Unicode."""
    try:
        ids, follows, _ = tokenizer.encode_parts([(context, False), (continuation, True)])
    except ValueError as error:
        raise ConfigError(f"the context {context[:40]!r} with {continuation[:40]!r}: {error}") from error
    size = [*follows, True].index(True)
    return ids[:size], ids[size:]


def scorer_of(run: TrainedRun, tokenizer: Tokenizer) -> Scorer:
    """Return the scorer of a checkpoint's model in this process. Only tokens of `tokenizer` are scored."""
    data = run.cfg.data
    # An imported model may have sequences of 131,072 tokens, whose logits would take tens of GB.
    length = min(data.seq_length, _ROW)
    rows = min(data.micro_batch_size * data.seq_length, _PASS) // length
    return Scorer(
        lambda batch: run.model(**{**batch.inputs(run.device), "labels": None}),
        run.model.groups,
        run.device,
        length,
        rows,
        min(run.vocab_size, tokenizer.vocab_size),
        run.context,
    )


def _packed(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the numbers of texts that fill a row of `size` tokens together, the longest first."""
    row: list[int] = []
    room = size
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if lengths[number] > room:
            yield row
            row, room = [], size
        if lengths[number] > 0:
            row.append(number)
            room -= lengths[number]
    if row:
        yield row
