"""Training samples: one global order of sequences, which is distributed over any number of ranks.

The order depends only on the seed, the sequence length and the sources. Sequence `i` of the run is found from `i` in
O(1) time and memory, so the position in the data is a single number. Changing the number of ranks, the micro-batch or
the tokens per step does not change which sequences come next.

- A source is cut into windows of seq_length tokens; the rest at its end is not used. Each epoch of a source visits all
  of its windows once, in the order of a keyed permutation that is computed, not stored.
- Sources are blended evenly: at any point each has had its share of the samples so far, within a sample or two.
- Windows run through the stream of documents without padding; document boundaries come from the token file's index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from sagetrain.config.schema import DataConfig, DataSource
from sagetrain.data import order
from sagetrain.data.batch import Batch, Sample, batch_of
from sagetrain.data.token_files import check_vocabulary, content, open_sources, shares, source_names

_ORDER = 2  # This is the version of the rules in order.py.
_EVALUATION_SEED = 0  # With this seed, held-out sequences are the same whatever the seed of the run.


class SampleStream:
    """The endless sequence of samples from a list of sources."""

    def __init__(
        self, data: DataConfig, sources: list[DataSource], seed: int, vocab_size: int, tokenizer_sha256: str | None
    ):
        """Open the token files of some of a run's sources. Raises ConfigError if they contradict the last two
        arguments, or open_sources refuses them.

        Args:
            sources: the token files and their weights. Weights are all numbers, or all "proportional"
                (config.rules.data).
            seed: seed of the order of samples.
            vocab_size: size of the vocabulary. Tokens outside of it are errors when they are read.
            tokenizer_sha256: hash of the run's tokenizer, if it has one. Files that were made with another one are
                errors.
        """
        self.seq_length, self.seed, self._vocab_size = data.seq_length, seed, vocab_size
        self.document_attention, self.document_positions = data.document_attention, data.document_positions
        self._sources = open_sources(sources, data.seq_length, data.document_attention, tokenizer_sha256)
        self._files = [file for source in self._sources for file in source.files]
        self.names = source_names([source.path for source in sources])
        self._identities = [source.identity() for source in self._sources]
        self._weights = [
            source.num_windows if source.weight == "proportional" else source.weight for source in self._sources
        ]
        self._blend = order.Blend(self._weights)
        self.fingerprint = self._fingerprint()

    @property
    def num_windows(self) -> int:
        """The number of different sequences in all sources together."""
        return sum(source.num_windows for source in self._sources)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sources together."""
        return sum(source.num_tokens for source in self._sources)

    def validate(self, deep: bool, first: bool, progress: Callable[[int], None] = lambda tokens: None) -> None:
        """Check blocks of every index, and with `deep` every token and checksum. Raises ConfigError that names the
        damaged file.

        Args:
            first: also check the whole index of files that `sagetrain prepare` did not write. The indexes that it
                writes are consistent by construction.
            progress: gets the number of tokens read since its last call.
        """
        for file, blocks in zip(self._files, shares(self._files), strict=True):
            whole = deep or (first and "sha256" not in file.provenance())
            file.validate(deep, self._vocab_size, progress, None if whole else blocks)
            progress(0)

    def content(self, progress: Callable[[int], None] = lambda tokens: None) -> dict[str, str]:
        """Return hashes of the files' contents (token_files.content). `progress` is called with 0 after each file."""
        return content(self._files, progress)

    def locate(self, index: int, seed: int | None = None) -> tuple[int, int]:
        """Return (source, window) of global sample `index`, in the order of `seed` (default: the stream's)."""
        source, rank = self._blend.locate(index)
        windows = self._sources[source].num_windows
        epoch, position = divmod(rank, windows)
        key = order.mixed(order.mixed(self.seed if seed is None else seed, source), epoch)
        return source, order.permute(position, windows, key)

    def sample(self, index: int, seed: int | None = None) -> Sample:
        """Return global sample `index` >= 0. The time it takes does not grow with the index."""
        source, window = self.locate(index, seed)
        file, window = self._sources[source].window(window)
        start = window * self.seq_length
        tokens = file.tokens(start, start + self.seq_length + 1)
        check_vocabulary(file, tokens, self._vocab_size)
        begins = file.document_starts(start, start + self.seq_length)
        counted = file.counted(start + 1, start + self.seq_length + 1)
        return Sample(tokens, [begin - start for begin in begins], source, counted)

    @property
    def masked(self) -> bool:
        """Whether some of the files say that not all of their tokens count in the loss."""
        return any(file.masked for file in self._files)

    def counted(self, first: int, count: int) -> int | None:
        """Return how many tokens of `count` samples count in the loss, by reading the masks. Return None if there are
        none."""
        if not self.masked:
            return None
        total = 0
        for index in range(first, first + count):
            source, window = self.locate(index)
            file, window = self._sources[source].window(window)
            start = window * self.seq_length + 1
            mask = file.counted(start, start + self.seq_length)
            total += self.seq_length if mask is None else int(mask.sum())
        return total

    def document_lengths(self, count: int) -> list[list[int]]:
        """Return for each of the first `count` samples the lengths of its documents, cut at the ends of the sample."""
        edges = ([0, *self.sample(index).document_starts, self.seq_length] for index in range(count))
        return [[stop - start for start, stop in pairwise(row)] for row in edges]

    def _fingerprint(self) -> str:
        """Return a hash of everything that decides which samples come, and in which order."""
        content = {
            "order": _ORDER,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "shares": self._blend.shares,
            "files": self._identities,
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Loader:
    """An iterator over the micro-batches of this rank, for any range of the stream.

    The caller holds the only cursor: the number of sequences that all ranks together have consumed. Threads prepare
    batches ahead of time. They change neither the order nor the content, and an error in one is raised where its batch
    is due.
    """

    def __init__(
        self, stream: SampleStream, *, dp_rank: int, dp_size: int, micro_batch_size: int, num_workers: int = 0
    ):
        """Start the threads, which prepare twice as many batches ahead. With `num_workers` 0, a batch is prepared when
        it is asked for."""
        self.stream = stream
        self._first = dp_rank * micro_batch_size
        self._stride = dp_size * micro_batch_size
        self._micro_batch_size = micro_batch_size
        self._ahead = 2 * num_workers
        self._pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None
        self._workers = num_workers
        self._pending: dict[int, Future[Batch]] = {}
        self._counting: tuple[range, list[Future[int]]] = range(0), []

    def step_batches(
        self, cursor: int, tokens_per_step: int, next_tokens_per_step: int | None = None
    ) -> Iterator[Batch]:
        """Yield the micro-batches of this rank for one optimizer step. Those of all ranks together are the samples
        cursor .. cursor + tokens_per_step / seq_length - 1, each once.

        Args:
            cursor: sequences that all ranks together have consumed.
            tokens_per_step: tokens of this step over all ranks, a multiple of micro_batch_size x dp_size x seq_length.
            next_tokens_per_step: tokens of the next step; with it, the threads go on into that step.
        """
        return self._batches(*self._both_keys(cursor, tokens_per_step, next_tokens_per_step))

    def last_batch(self, cursor: int, micro_batches: int, dp_rank: int) -> Batch:
        """Return the last of the micro-batches of any data-parallel rank in the step that begins at `cursor`."""
        return self._step_batch(cursor + (micro_batches - 1) * self._stride + dp_rank * self._micro_batch_size)

    def counted(self, cursor: int, tokens_per_step: int, next_tokens_per_step: int | None = None) -> int | None:
        """Return how many tokens of this rank's micro-batches of one step count in the loss, or None without masks.

        Each rank reads its own masks, and the threads read those of the next step ahead, so the time does not grow with
        the number of ranks.
        """
        if not self.stream.masked:
            return None
        keys, next_keys = self._both_keys(cursor, tokens_per_step, next_tokens_per_step)
        if self._pool is None:
            return self._count(keys)
        known, parts = self._counting
        if known != keys:
            parts = self._count_ahead(self._pool, keys)
        self._counting = next_keys, self._count_ahead(self._pool, next_keys)
        return sum(part.result() for part in parts)

    def eval_size(self, num_sequences: int) -> int:
        """Return the number of sequences that eval_batches evaluates: as many as are asked for, or all that the sources
        hold."""
        return min(num_sequences, self.stream.num_windows)

    def eval_batches(self, num_sequences: int) -> Iterator[Batch]:
        """Yield the micro-batches of this rank over a fixed choice of sequences, the same each time and for every seed.

        The batches of all ranks together are exactly eval_size(num_sequences) sequences, and each rank has equally many
        batches. Empty places in the last batches are filled with the first sequence, which does not count there
        (Batch.weight), so that no new shapes have to be compiled.
        """
        count = self.eval_size(num_sequences)
        for key in range(self._first, self._first + -(-count // self._stride) * self._stride, self._stride):
            ids = [index for index in range(key, key + self._micro_batch_size) if index < count]
            yield self._batch([*ids, *[0] * (self._micro_batch_size - len(ids))], _EVALUATION_SEED, weight=len(ids))

    def close(self) -> None:
        """Stop the threads. The loader cannot be used afterwards."""
        self._discard(set())
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _keys(self, cursor: int, tokens_per_step: int) -> range:
        """Return the index of the first sample of each micro-batch of this rank. It determines the batch."""
        multiple = self._stride * self.stream.seq_length
        if tokens_per_step < 1 or tokens_per_step % multiple:
            raise ValueError(
                f"tokens_per_step {tokens_per_step} is no multiple of micro_batch_size x data_parallel_size x "
                f"seq_length = {multiple}"
            )
        return range(cursor + self._first, cursor + tokens_per_step // self.stream.seq_length, self._stride)

    def _both_keys(self, cursor: int, tokens_per_step: int, next_tokens_per_step: int | None) -> tuple[range, range]:
        """Return the keys of a step's micro-batches, and those of the next step if its size is known."""
        after = cursor + tokens_per_step // self.stream.seq_length
        ahead = self._keys(after, next_tokens_per_step) if next_tokens_per_step else range(0)
        return self._keys(cursor, tokens_per_step), ahead

    def _count_ahead(self, pool: ThreadPoolExecutor, keys: range) -> list[Future[int]]:
        """Count the tokens of these micro-batches in all threads."""
        return [pool.submit(self._count, keys[first :: self._workers]) for first in range(self._workers)]

    def _count(self, keys: range) -> int:
        return sum(self.stream.counted(key, self._micro_batch_size) or 0 for key in keys)

    def _batches(self, keys: range, next_keys: range) -> Iterator[Batch]:
        if self._pool is None:
            for key in keys:
                yield self._step_batch(key)
            return
        due = [*keys, *next_keys[: self._ahead]]
        self._discard(set(due))
        for number, key in enumerate(keys):
            for later in due[number : number + 1 + self._ahead]:
                if later not in self._pending:
                    self._pending[later] = self._pool.submit(self._step_batch, later)
            yield self._pending.pop(key).result()

    def _discard(self, keep: set[int]) -> None:
        """Drop the prepared batches that will not be needed."""
        for key in self._pending.keys() - keep:
            self._pending.pop(key).cancel()

    def _step_batch(self, key: int) -> Batch:
        return self._batch(range(key, key + self._micro_batch_size))

    def _batch(self, ids: Sequence[int], seed: int | None = None, weight: int | None = None) -> Batch:
        read = {index: self.stream.sample(index, seed) for index in ids}
        how = self.stream.document_attention, self.stream.document_positions
        return batch_of([read[index] for index in ids], *how, ids=ids, weight=weight)
