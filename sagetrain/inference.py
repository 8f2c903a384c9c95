"""Use what a run has trained: held-out loss and text, in one process, on a GPU or without one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sagetrain.config.fit import padded_vocab_size
from sagetrain.config.load import load_config
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.tokenizer import TOKENIZER_NAME, Tokenizer, find_tokenizer
from sagetrain.model.attention import resolve_backend
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.train import checkpoint
from sagetrain.train.checkpoint import CheckpointError, Reader


@dataclass
class TrainedRun:
    """A model with the weights of a checkpoint, and what it was trained with."""

    cfg: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    vocab_size: int
    step: int
    tokens: int
    device: torch.device


def load_run(run_dir: Path, report) -> TrainedRun:
    """The newest whole checkpoint of a run folder as a model. Damaged checkpoints passed over go to `report`.

    Raises CheckpointError if there is none.
    """
    folder, _ = checkpoint.newest_whole(run_dir / "checkpoints", report)
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint; train it first: sagetrain train --config ...")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    groups = ParallelGroups.single()
    reader = Reader(folder)
    state = reader.manifest["state"]
    cfg = load_config(folder / "config.yaml")
    kept = run_dir / TOKENIZER_NAME  # by training
    file = kept if kept.is_file() else find_tokenizer(cfg.data)
    tokenizer = Tokenizer.load(file)
    trained_with = state["identity"]["tokenizer (SHA-256)"]
    if tokenizer.sha256 != trained_with:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer (SHA-256 {trained_with[:12]}) than {file} "
            f"({tokenizer.sha256[:12]}); put that file back"
        )
    dtype = torch.bfloat16 if device.type == "cuda" and cfg.training.dtype == "bf16" else torch.float32
    try:
        backend, _ = resolve_backend(cfg.attention, cfg.model, device=device, dtype=dtype)
    except ValueError as error:  # trained on other hardware
        report(f"{error}; sdpa is used here")
        backend = "sdpa"
    if backend == "auto":  # which timed the training step; here any exact backend will do
        backend = "sdpa"
    attention = cfg.attention.model_copy(update={"backend": backend})
    vocab_size = state["identity"]["vocab_size"]
    model = Transformer(
        cfg.model,
        attention,
        vocab_size=padded_vocab_size(vocab_size),
        groups=groups,
        seed=cfg.training.seed,
        dtype=dtype,
        device=device,
    )
    checkpoint.load_weights(reader, model, groups)
    model.eval()
    return TrainedRun(cfg, model, tokenizer, vocab_size, state["step"], state["tokens"], device)


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
    total, batches, counts = 0.0, 0, np.zeros(run.vocab_size, np.int64)
    for batch in loader.eval_batches(num_sequences):
        total, batches = total + run.model(**batch.inputs(run.device)).item(), batches + 1
        counts += np.bincount(batch.labels.flatten().numpy(), minlength=run.vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return Evaluation(total / batches, float(-(shares * np.log(shares)).sum()), int(counts.sum()))


@torch.no_grad()
def generate(run: TrainedRun, prompt: str, max_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
    """Continue `prompt`, yielding the text piece by piece until `max_tokens` or the end-of-document token.

    temperature 0 takes the likeliest token; top_k 0 samples from all. The whole context is recomputed for every
    token: right for a look at a model, not for serving it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = run.tokenizer.encode(prompt)
    if not tokens:
        tokens = [run.tokenizer.eos_id]  # what precedes every document in the token file
    start = shown = len(tokens)
    said, known = "", min(run.vocab_size, run.tokenizer.vocab_size)
    for _ in range(max_tokens):
        context = torch.tensor([tokens[-run.cfg.data.seq_length :]], device=run.device)
        logits = run.model(context)[0, -1, :known].float().cpu()
        if temperature > 0:
            logits /= temperature
            if top_k:
                logits[logits < logits.topk(min(top_k, known)).values[-1]] = -math.inf
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == run.tokenizer.eos_id:
            break
        tokens.append(token)
        text = run.tokenizer.decode(tokens[start:])
        if not text.endswith("�"):  # a character may span several byte tokens
            yield text[len(said) :]
            said, shown = text, len(tokens)
    if shown < len(tokens):
        yield run.tokenizer.decode(tokens[start:])[len(said) :]
