"""Turn text into tokens, in this process or in several. The tokens and their order do not depend on the number of
processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sagetrain.config.arguments import from_python, speak_python
from sagetrain.config.errors import ConfigError
from sagetrain.corpus.chunk import HASHED_BYTES, Chunk, place_of
from sagetrain.corpus.counts import Counts, Tally
from sagetrain.corpus.long_texts import between_seams, pieces
from sagetrain.corpus.messages import texts_in
from sagetrain.corpus.notes import APART, ENDLESS, FORGED, REPEATED, UNKNOWN, UNREAD, WRITTEN, Notes
from sagetrain.corpus.records import Records
from sagetrain.data.token_file import token_dtype
from sagetrain.data.tokenizer import Tokenizer

ALONE_SECONDS = 0.5
"""A worker takes about so many seconds to start. A corpus that takes fewer is encoded without workers."""


@dataclass
class EncodedPart:
    """The documents of one chunk that go to one file. `lengths` are the lengths of consecutive documents in
    `tokens`."""

    tokens: np.ndarray
    lengths: np.ndarray
    counted: np.ndarray | None = None
    """For records: which tokens count in the loss, bool."""


@dataclass
class Encoded:
    """A chunk as tokens."""

    chunk: Chunk
    """The chunk without its texts, with its place in the corpus."""
    parts: dict[str, EncodedPart]
    """The documents, by "train" and "valid"."""
    tally: Tally


@dataclass
class _Record:
    tokens: np.ndarray
    counted: np.ndarray
    text: bytes


@dataclass
class Encoder:
    """A function from Chunk to Encoded. It depends on nothing else, so that any process can run it."""

    tokenizer: Tokenizer
    text_key: str
    """The field that holds the text."""
    valid_fraction: float
    """The share of the documents that goes to the held-out file."""
    skip_bad_lines: bool = False
    """Count bad lines instead of raising an error."""
    records: Records | None = None
    """The way in which records of fine-tuning are read; None for plain text."""
    prefix: Sequence[int] = ()
    """The tokens before each document, or before each record that no template wrote."""

    def __post_init__(self) -> None:
        self._dtype = token_dtype(self.tokenizer.vocab_size)
        self._is_control = np.zeros(self.tokenizer.vocab_size, bool)
        self._is_control[[*self.tokenizer.control_tokens, *self.tokenizer.unknown_tokens]] = True

    def __call__(self, chunk: Chunk) -> Encoded:
        tally = Tally({"train": Counts(), "valid": Counts()})
        parts = self._encode_records(chunk, self.records, tally) if self.records else self._encode_texts(chunk, tally)
        for side, part in parts.items():
            tally.counts[side].tokens = len(part.tokens)
        tally.notes.update({(REPEATED, repr(key)): count for key, count in chunk.repeated.items()})
        # What a worker sends back has nothing of the texts.
        read = replace(chunk, records=[], split_key=None, before=b"", behind=b"")
        return Encoded(read, parts, tally)

    def _encode_texts(self, chunk: Chunk, tally: Tally) -> dict[str, EncodedPart]:
        tokens: dict[str, list[np.ndarray]] = {"train": [], "valid": []}
        around = Counter[int]()
        texts = list(chunk.texts(self.text_key, self.skip_bad_lines))
        for number, text in enumerate(texts, 1):
            if text is None:
                tally.counts["train"].empty_documents += 1
                continue
            if isinstance(text, ConfigError):
                tally.leave_out(text)
                continue
            begins, ends = number > 1 or not chunk.continues, number < len(texts) or not chunk.unfinished
            before, behind = self.prefix if begins else [], [self.tokenizer.eos_id] if ends else []
            data = text.encode()
            if chunk.before or chunk.behind:
                text = between_seams(self.tokenizer, text, chunk.before, chunk.behind)
            document = [np.array(before, self._dtype)]
            document += (np.array(ids, self._dtype) for ids in pieces(self.tokenizer, text))
            document.append(np.array(behind, self._dtype))
            around.update([*before, *behind])
            side = self._side(chunk.split_key or data[:HASHED_BYTES])
            tokens[side].append(np.concatenate(document))
            tally.counts[side].bytes += len(data)
        parts = {
            side: EncodedPart(np.concatenate(every), np.array([len(each) for each in every]))
            for side, every in tokens.items()
            if every
        }
        for part in parts.values():
            self._note_written(part.tokens, around, tally.notes)
        return parts

    def _note_written(self, tokens: np.ndarray, around: Counter[int], notes: Notes) -> None:
        """Count the control tokens that are written in texts, and unknown tokens. `around` are the control tokens that
        stand around the texts; what is counted is taken out of them."""
        found = Counter(tokens[self._is_control[tokens]].tolist())
        for token, count in (found - around).items():
            sentence = UNKNOWN if token in self.tokenizer.unknown_tokens else WRITTEN
            notes[sentence, repr(self.tokenizer.spelling(token))] += count
        around.subtract(found & around)

    def _encode_records(self, chunk: Chunk, records: Records, tally: Tally) -> dict[str, EncodedPart]:
        """Pack the records of each side into sequences of seq_length. Records stay whole unless one alone is longer."""
        sides: dict[str, list[_Record]] = {"train": [], "valid": []}
        counts, keys = tally.counts["train"], None if records.templated else records.fields
        tally.notes.update({(UNREAD, name): len(chunk.records) for name in chunk.unread})
        for each in chunk.values(partial(self._encode_record, records, tally.notes), self.skip_bad_lines, keys):
            if isinstance(each, ConfigError):
                tally.leave_out(each)
                continue
            longer, there = len(each.tokens) > records.seq_length, each.counted[: records.seq_length].any()
            each.tokens, each.counted = each.tokens[: records.seq_length], each.counted[: records.seq_length]
            counts.cut_records += bool(longer and there)
            counts.too_long_records += not there
            if there:
                sides[self._side(each.text[:HASHED_BYTES])].append(each)
        return {
            side: self._packed(rows, records.seq_length, tally.counts[side]) for side, rows in sides.items() if rows
        }

    def _encode_record(self, records: Records, notes: Notes, record: dict[str, Any]) -> _Record:
        parts = records.parts(record, self.tokenizer.special_tokens, notes)
        ids, counted, apart = self.tokenizer.encode_parts(parts)
        notes[APART, ""] += bool(apart)
        if records.templated:
            held = [record.get(name) for name in (*records.fields, *records.optional_fields)]
            forged = (each for text in texts_in(held) for each in self.tokenizer.control_texts_in(text))
            notes.update((FORGED, repr(each)) for each in forged)
            for token in self.tokenizer.unknown_tokens:
                notes[UNKNOWN, repr(self.tokenizer.spelling(token))] += ids.count(token)
            notes[ENDLESS, ""] += not all(self._ends(ids[start:stop]) for start, stop in _runs(counted))
        else:
            self._note_written(np.array(ids, self._dtype), Counter(), notes)
            ids = [*self.prefix, *ids, self.tokenizer.eos_id]
            counted = [*(False for _ in self.prefix), *counted, True]
        counted[0] = False  # The token before it belongs to another record.
        text = "".join(text for text, _ in parts).encode()
        return _Record(np.array(ids, self._dtype), np.array(counted, bool), text)

    def _ends(self, answer: list[int]) -> bool:
        """Whether an answer ends with a control token, apart from white space behind it."""
        tokenizer = self.tokenizer
        for token in reversed(answer):
            if token == tokenizer.eos_id or tokenizer.is_control(token):
                return True
            if tokenizer.decode([token]).strip():
                return False
        return False

    def _packed(self, rows: list[_Record], seq_length: int, counts: Counts) -> EncodedPart:
        """Put each record, the longest first, into the first sequence that has room for it, and count what is there.
        The room that is left at the end of a sequence belongs to its last record, so that there are no more documents
        than records."""
        rows = sorted(rows, key=lambda row: -len(row.tokens))
        room = np.full(len(rows), seq_length)
        sequences: list[list[_Record]] = []
        for row in rows:
            first = int((room >= len(row.tokens)).argmax())
            if first == len(sequences):
                sequences.append([])
            sequences[first].append(row)
            room[first] -= len(row.tokens)
        tokens, counted, lengths = [], [], []
        for sequence, left in zip(sequences, room, strict=False):
            tokens += [*(row.tokens for row in sequence), np.full(left, self.tokenizer.eos_id, self._dtype)]
            counted += [*(row.counted for row in sequence), np.zeros(left, bool)]
            lengths += [len(row.tokens) for row in sequence]
            lengths[-1] += left
        counts.padding_tokens = int(room[: len(sequences)].sum())
        counts.bytes = sum(len(row.text) for row in rows)
        counts.counted_tokens = sum(int(row.counted.sum()) for row in rows)
        return EncodedPart(np.concatenate(tokens), np.array(lengths), np.concatenate(counted))

    def _side(self, key: bytes) -> str:
        return "valid" if self.valid_fraction and place_of(key) < self.valid_fraction * 2**64 else "train"


def _runs(counted: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive tokens that count: the first token, and the place behind the last."""
    edges = [place for place, (a, b) in enumerate(pairwise([False, *counted, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def encode(chunks: Iterable[Chunk], encoder: Encoder, num_workers: int) -> Iterator[Encoded]:
    """Yield the encoded chunks in their order. This process encodes the first ones. Then chunk n goes to worker
    n mod num_workers, and each worker is at most two chunks ahead.

    The processes are connected by pipes. A ProcessPoolExecutor may wait for ever when one of its processes is killed.
    """
    chunks, begin = iter(chunks), time.process_time()
    for chunk in chunks:
        yield encoder(chunk)
        if num_workers > 1 and time.process_time() - begin > ALONE_SECONDS:
            break
    else:
        return
    workers: list[_Worker] = []
    try:
        workers += [_Worker() for _ in range(num_workers)]
        for worker in workers:  # All workers are started first, because `send` waits until its worker is up.
            worker.send(encoder)
        sent = taken = 0
        for chunk in chunks:
            if sent - taken == 2 * num_workers:
                yield workers[taken % num_workers].receive()
                taken += 1
            workers[sent % num_workers].send(chunk)
            sent += 1
        for number in range(taken, sent):
            yield workers[number % num_workers].receive()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that receives an encoder and then chunks, and sends back each encoded chunk."""

    def __init__(self) -> None:
        # A fork would copy locks that other threads hold.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, from_python()), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Encoder | Chunk) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Encoded:
        try:
            result: Encoded | ConfigError = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(result, ConfigError):
            raise result
        return result

    def stop(self) -> None:
        # The worker ends when it sees this, whatever it is doing.
        self._connection.close()
        self._process.join()

    def _died(self) -> ConfigError:
        self._process.join()
        return ConfigError(
            f"a worker process ended unexpectedly (exit code {self._process.exitcode}; out of memory?): try fewer "
            "workers, and see that a script that calls prepare() with several workers does so under "
            '`if __name__ == "__main__":`'
        )


def _work(connection: Connection, python: bool) -> None:
    """Run a worker. A thread receives what the parent sends, so that neither process ever waits for the other to
    read. `python`: errors spell settings as Python does."""
    if python:
        speak_python()
    # Ctrl-C reaches the whole process group, and the parent decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take_in() -> None:
        try:
            while True:
                messages.put(connection.recv())
        except (EOFError, OSError):  # The parent has finished, or has died.
            os._exit(0)

    threading.Thread(target=take_in, daemon=True).start()
    encoder = messages.get()
    while True:
        try:
            result = encoder(messages.get())
        except ConfigError as error:
            result = error
        try:
            connection.send(result)
        except OSError:  # The parent has died.
            os._exit(0)
