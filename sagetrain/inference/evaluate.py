"""Held-out loss of what a run has trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.inference.load import TrainedRun

_UNIGRAM_TOKENS = 1 << 24  # of the training data: their frequencies are off by .003 nats for 100,000 different ones
_AT_ONCE = 256  # sequences


@dataclass(frozen=True)
class Evaluation:
    """Mean losses in nats per token."""

    loss: float
    unigram_loss: float | None
    """Of the same tokens by their frequencies in the training data: what a model without context would reach. None:
    the training data is not here."""
    sequences: int
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def evaluate(
    run: TrainedRun,
    num_sequences: int,
    *,
    path: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Loss on `num_sequences` held-out sequences, or all if there are fewer; the same that training evaluates on.

    path: a token file, without suffix, instead of data.valid. report: hears why there is no unigram_loss.

    Raises:
        ConfigError: no held-out data, or it cannot be read or comes from another tokenizer.
    """
    data = run.cfg.data
    sources = [DataSource(path=path)] if path else data.valid
    if not sources:
        raise ConfigError("data.valid is empty: the run has no held-out data to evaluate on; name some with --data")
    stream = _stream(run, sources)
    nats = None
    try:
        nats = unigram_nats(_stream(run, data.train), run.vocab_size)
    except ConfigError as error:
        report(f"no unigram loss: {error}")
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=data.micro_batch_size, num_workers=0)
    loss = unigram = sequences = 0
    for batch in loader.eval_batches(num_sequences):
        loss += batch.weight * run.model(**batch.inputs(run.device)).item()
        sequences += batch.weight
        if nats is not None:
            unigram += nats[batch.labels[: batch.weight].numpy()].sum()
    tokens = sequences * data.seq_length
    return Evaluation(loss / sequences, None if nats is None else float(unigram / tokens), sequences, tokens)


def unigram_nats(stream: SampleStream, vocab_size: int) -> np.ndarray:
    """-log of each token's frequency in a stream, fp64 [vocab_size], from its first 16M tokens at most, in its mix.

    Every token counts once more than it was seen, so that no frequency is 0 (Laplace's smoothing).
    """
    counts = np.ones(vocab_size)
    sequences = min(stream.num_windows, -(-_UNIGRAM_TOKENS // stream.seq_length))
    for first in range(0, sequences, _AT_ONCE):
        samples = [stream.sample(index).tokens[1:] for index in range(first, min(first + _AT_ONCE, sequences))]
        counts += np.bincount(np.concatenate(samples), minlength=vocab_size)
    nats: np.ndarray = -np.log(counts / counts.sum())
    return nats


def _stream(run: TrainedRun, sources: list[DataSource]) -> SampleStream:
    seed = run.cfg.training.seed
    tokenizer = run.tokenizer.sha256 if run.tokenizer else None
    return SampleStream.configured(run.cfg.data, sources, seed, run.vocab_size, tokenizer)
