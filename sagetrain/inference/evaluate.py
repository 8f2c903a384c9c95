"""Held-out loss of what a run has trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sagetrain.data.loader import Loader, SampleStream
from sagetrain.inference.load import TrainedRun


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token, and the entropy of the same tokens' own unigram distribution: what the best
    model that ignores context would reach."""

    loss: float
    unigram_entropy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def evaluate(run: TrainedRun, num_sequences: int) -> Evaluation:
    """Loss on the first `num_sequences` held-out sequences, the same ones that training evaluates on."""
    data = run.cfg.data
    stream = SampleStream.configured(data, data.valid, run.cfg.training.seed, run.vocab_size, run.tokenizer.sha256)
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=data.micro_batch_size, num_workers=0)
    total, sequences, counts = 0.0, 0, np.zeros(run.vocab_size, np.int64)
    for batch in loader.eval_batches(num_sequences):
        total += batch.weight * run.model(**batch.inputs(run.device)).item()
        sequences += batch.weight
        counts += np.bincount(batch.labels[: batch.weight].flatten().numpy(), minlength=run.vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return Evaluation(total / sequences, float(-(shares * np.log(shares)).sum()), int(counts.sum()))
