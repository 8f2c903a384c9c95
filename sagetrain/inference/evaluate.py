"""Evaluate a trained run: loss, perplexity and bits per byte, by source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many
from sagetrain.config.schema import DataSource
from sagetrain.data.batch import MASKED, Batch, batch_of
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.token_files import source_names
from sagetrain.inference.load import TrainedRun
from sagetrain.inference.located import check_there
from sagetrain.inference.windows import PreparedDocuments, Raw, decoded_bytes, text_of, windows
from sagetrain.stability.choices import watching

# From this many tokens of the training data, frequencies are off by 0.003 nats if there are 100,000 different ones.
_UNIGRAM_TOKENS = 1 << 24
# This is a number of sequences.
_AT_ONCE = 256


@dataclass
class Evaluation:
    """The evaluation of one source, or of several together. All sums are in float64."""

    name: str
    """The source: its path, or the part of the path in which sources differ."""
    nats: float = 0.0
    """Sum of the losses of all tokens, including those that end documents."""
    tokens: int = 0
    """Number of tokens that were scored."""
    bytes: int | None = 0
    """Bytes of the text in UTF-8. None: there is no tokenizer and so no text, or not all of it counts in the loss."""
    unigram_nats: float | None = None
    """Sum of the losses of the same tokens by their frequencies in the training data, which is the best that a model
    without context could reach. None: the training data is not here."""
    counted: str = "in the decoded tokens"
    """The way in which the bytes were counted."""
    sequences: int = 0
    """Number of sequences of data.valid; 0 for text."""
    chosen: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """The number of choices of each expert by layer with experts, of all tokens that the model read."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The losses in bits over the bytes of the text. None if the bytes are not known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def unigram_loss(self) -> float | None:
        """The loss of a model without context, in nats per token. None if the training data is not here."""
        return None if self.unigram_nats is None else self.unigram_nats / self.tokens


def together(parts: Sequence[Evaluation], name: str = "all") -> Evaluation:
    """Merge several evaluations into one."""
    sizes, unigrams = [part.bytes for part in parts], [part.unigram_nats for part in parts]
    return Evaluation(
        name,
        sum(part.nats for part in parts),
        sum(part.tokens for part in parts),
        None if None in sizes else sum(filter(None, sizes)),
        None if None in unigrams else sum(filter(None, unigrams)),
        ", ".join(dict.fromkeys(part.counted for part in parts)),
        sum(part.sequences for part in parts),
        {layer: sum((part.chosen[layer] for part in parts[1:]), counts) for layer, counts in parts[0].chosen.items()},
    )


@torch.no_grad()
def evaluate(
    run: TrainedRun, num_sequences: int, report: Callable[[str], None] = lambda text: None
) -> list[Evaluation]:
    """Compute losses on `num_sequences` sequences of data.valid, or on all if there are fewer, by source. They are the
    sequences that training evaluates on. `report` gets the reason if there are no unigram losses. Raises ConfigError if
    there is no held-out data, it cannot be read, or it comes from another tokenizer."""
    stream, nats = run.stream(_held_out(run)), _training_nats(run, report)
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=run.cfg.data.micro_batch_size, num_workers=0)
    found = [_begin(run, name, nats) for name in stream.names]
    for batch in loader.eval_batches(num_sequences):
        every, chosen = _losses(run, batch)
        for row, losses in enumerate(every[: batch.weight]):
            part, tokens = found[batch.sources[row]], batch.labels[row].numpy()
            part.sequences += 1
            _add(part, losses, tokens, nats)
            _count(part, chosen, slice(row, row + 1))
            if part.bytes is not None and run.tokenizer:
                begin = batch.tokens[row, :1].numpy()
                whole = np.concatenate([begin, tokens])
                part.bytes += decoded_bytes(run.tokenizer, whole) - decoded_bytes(run.tokenizer, begin)
    found = [part for part in found if part.tokens]
    if not found:
        asked = many(num_sequences, "sequence")
        raise ConfigError(f"no token of {asked} of data.valid counts in the loss: ask for more")
    return found


@torch.no_grad()
def evaluate_texts(
    run: TrainedRun,
    paths: Sequence[str] = (),
    stride: int | None = None,
    *,
    text_key: str = "text",
    report: Callable[[str], None] = lambda text: None,
) -> list[Evaluation]:
    """Compute losses on all of each text. Every token is scored once, in windows as long as the context. Raises
    ConfigError if the stride is longer than the context, there is no data, or the data cannot be read, holds no text or
    comes from another tokenizer.

    Args:
        paths: token files (NAME, or NAME.bin if a file or folder NAME is there), or text that `sagetrain prepare` could
            read. None given: the token files of data.valid.
        stride: tokens between two windows (inference/windows.py). Default: half of the context.
        text_key: field or column that holds the text.
        report: gets the reason if there are no unigram losses.
    """
    data, size = run.cfg.data, run.cfg.data.seq_length
    stride = stride or default_stride(size)
    if stride > size:
        raise ConfigError(
            f"{spelled('stride')} {stride:,} is longer than the windows, data.seq_length {size:,}: tokens between two "
            f"of them would not be scored; give at most {size:,}"
        )
    held_out = [] if paths else _held_out(run)
    known = run.tokenizer, run.vocab_size
    texts = [text_of(path, *known, text_key, run.texts.prefix) for path in paths]
    texts += [PreparedDocuments(source.path, source.files, *known) for source in held_out]
    nats, found = _training_nats(run, report), []
    for name, text in zip(paths or source_names([source.path for source in held_out]), texts, strict=True):
        part = _begin(run, name, nats)
        begun = run.texts.prefix and isinstance(text, Raw)
        every = windows(text, size, stride, run.tokenizer.eos_id if run.tokenizer and not begun else -1)
        with tqdm(desc=name, unit=" tokens", unit_scale=True, disable=None, leave=False) as progress:
            for _, alike in groupby(every, lambda window: len(window[0].tokens)):
                while some := list(islice(alike, data.micro_batch_size)):
                    samples = [sample for sample, _ in some]
                    batch = batch_of(samples, data.document_attention, data.document_positions)
                    every_loss, chosen = _losses(run, batch)
                    _count(part, chosen, slice(None))
                    for losses, labels, (_, count) in zip(every_loss, batch.labels.numpy(), some, strict=True):
                        _add(part, losses[-count:], labels[-count:], nats)
                        progress.update(count)
        if not part.tokens:
            raise ConfigError(f"{spelled('texts')} {text.name}: there is no text in it")
        part.bytes, part.counted = text.bytes, text.counted
        found.append(part)
    return found


def default_stride(size: int) -> int:
    """Return the default distance in tokens between windows of `size` tokens. Each token has at least half a window of
    context, for twice the work."""
    return max(1, size // 2)


def unigram_nats(stream: SampleStream, vocab_size: int) -> NDArray[np.float64]:
    """Return -log of each token's frequency in a stream, fp64 [vocab_size], from at most its first 16M tokens, in its
    mix.

    Every token counts once more than it was seen, so that no frequency is 0 (Laplace's smoothing).
    """
    counts = np.ones(vocab_size)
    sequences = min(stream.num_windows, -(-_UNIGRAM_TOKENS // stream.seq_length))
    for first in range(0, sequences, _AT_ONCE):
        samples = [stream.sample(index).tokens[1:] for index in range(first, min(first + _AT_ONCE, sequences))]
        counts += np.bincount(np.concatenate(samples), minlength=vocab_size)
    nats: NDArray[np.float64] = -np.log(counts / counts.sum())
    return nats


def _held_out(run: TrainedRun) -> list[DataSource]:
    if not run.cfg.data.valid:
        raise ConfigError(
            f"data.valid is empty: the run has no held-out data to evaluate on; name some with {spelled('texts')}"
        )
    check_there("valid", run.cfg.data.valid)
    return run.cfg.data.valid


def _training_nats(run: TrainedRun, report: Callable[[str], None]) -> NDArray[np.float64] | None:
    if run.cfg.data.missing:
        report("no unigram loss: an imported model has no training data")
        return None
    try:
        check_there("train", run.cfg.data.train)
        return unigram_nats(run.stream(run.cfg.data.train), run.vocab_size)
    except ConfigError as error:
        report(f"no unigram loss: {error}")
        return None


def _begin(run: TrainedRun, name: str, nats: NDArray[np.float64] | None) -> Evaluation:
    return Evaluation(name, bytes=0 if run.tokenizer else None, unigram_nats=None if nats is None else 0.0)


def _add(
    part: Evaluation, losses: NDArray[np.float64], tokens: NDArray[np.int64], nats: NDArray[np.float64] | None
) -> None:
    """Add the losses of tokens. MASKED tokens have a loss of 0 and do not count, and then the bytes of the text do not
    count either."""
    counted = tokens[tokens != MASKED]
    part.nats += float(losses.sum())
    part.tokens += len(counted)
    if len(counted) < len(tokens):
        part.bytes = None
    if nats is not None and part.unigram_nats is not None:
        part.unigram_nats += float(nats[counted].sum())


def _losses(run: TrainedRun, batch: Batch) -> tuple[NDArray[np.float64], Mapping[int, NDArray[np.int64]]]:
    """Return the loss of each token of each sequence, [B, S], and how many choices of each sequence fell on each
    expert, [B, experts] for each layer with experts."""
    chosen: dict[int, NDArray[np.int64]] = {}
    experts = run.cfg.model.experts
    size = len(batch.tokens), experts.number if experts else 0

    def count(layer: int, choices: torch.Tensor) -> None:
        places = choices.reshape(size[0], -1) + size[1] * torch.arange(size[0], device=choices.device)[:, None]
        chosen[layer] = torch.bincount(places.flatten(), minlength=size[0] * size[1]).view(size).cpu().numpy()

    with watching(run.model, count) if experts else nullcontext():
        return run.model(**batch.inputs(run.device), by_token=True).double().cpu().numpy(), chosen


def _count(part: Evaluation, chosen: Mapping[int, NDArray[np.int64]], rows: slice) -> None:
    for layer, counts in chosen.items():
        part.chosen[layer] = part.chosen.get(layer, 0) + counts[rows].sum(0)
