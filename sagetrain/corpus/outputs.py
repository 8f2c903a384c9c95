"""The files of one `sagetrain prepare` while they are written: token files, their tokenizer, and the record from which
the next call goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sagetrain.config.errors import ConfigError, many
from sagetrain.config.rules.prepared import CHAT_TEMPLATE
from sagetrain.corpus.chunk import Place
from sagetrain.corpus.counts import Counts, Tally
from sagetrain.corpus.destination import Destination
from sagetrain.corpus.encode import Encoder, encode
from sagetrain.corpus.journal import Journal, Unfinished
from sagetrain.corpus.notes import Notes
from sagetrain.corpus.progress import Progress
from sagetrain.corpus.records import Chats
from sagetrain.corpus.request import Request
from sagetrain.corpus.sources import Corpus
from sagetrain.corpus.token_writer import TokenFileWriter, writing
from sagetrain.data.token_file import token_path
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import parted


@contextmanager
def claimed(there: Destination) -> Iterator[Outputs]:
    """Yield the outputs of a call. Until the end no other process may write there, or change the record of an
    unfinished call."""
    writers: dict[str, TokenFileWriter] = {}
    try:
        for side, path in there.outputs.items():
            writers[side] = TokenFileWriter(path)
        yield Outputs(there, writers)
    finally:
        kept = Journal(there.train).exists
        for writer in reversed(list(writers.values())):  # The first writer may have made the folder.
            writer.abort(keep=kept)


class Outputs:
    """The token files that a call writes, their tokenizer, and the record of how far they are. Writing continues where
    an earlier call was interrupted."""

    def __init__(self, there: Destination, writers: Mapping[str, TokenFileWriter]):
        self._there, self._writers = there, writers
        self.journal, self._tally = Journal(there.train), Tally({side: Counts() for side in writers})
        self._left: Unfinished | None = None
        self._made_from: dict[str, Any]
        self._corpus: Corpus
        self._encoder: Encoder
        self._trained: bytes | None
        self._begun: Unfinished

    def read(self, made_from: dict[str, Any], overwrite: bool) -> None:
        """Read what an earlier call for the same request has left. Raises ConfigError as Journal.read does."""
        self._made_from, self._left = made_from, self.journal.read(made_from, overwrite)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that an earlier call had trained, or None. Raises ConfigError if it has changed."""
        return Tokenizer(self.journal.tokenizer(self._left)) if self._left else None

    def begin(self, corpus: Corpus, encoder: Encoder, trained: bool) -> str:
        """Open the files, with what an earlier call has left. Return a sentence about the place where writing goes on,
        or "" if it begins. `trained`: the tokenizer was trained for these files."""
        self._corpus, self._encoder = corpus, encoder
        self._trained = encoder.tokenizer.model if trained else None
        left, place, done = self._left, Place(), 0
        if not all(token_path(path, ".bin.partial").exists() for path in self._there.outputs.values()):
            # The call was interrupted between the renames at its very end, so the files are written once more.
            left = None
        if left:
            place, done = left.place, left.progress
            counts = {side: Counts(**recorded) for side, recorded in left.counts.items()}
            notes = Notes({(sentence, key): count for sentence, key, count in left.notes})
            self._tally = Tally(counts, left.first_bad, notes)
        for side, writer in self._writers.items():
            written = left.written[side] if left else None
            writer.begin(encoder.tokenizer.vocab_size, written, masked=encoder.records is not None)
        self._begun = self._so_far(place, done)
        where = corpus.inputs[place.input].name
        return f"{self._there.train}: going on after {many(self._tally.tokens, 'token')}, in {where}" if left else ""

    def write(self, num_workers: int, shown: bool) -> None:
        """Write the rest of the text into files that do not have their names yet. `shown`: with a progress bar."""
        place, journal = self._begun.place, self.journal
        if journal.exists or journal.due:  # The journal may be due already if training the tokenizer took long.
            journal.write(self._begun, self._trained)
        with Progress(self._corpus, place, self._begun.progress, shown) as progress:
            for encoded in encode(self._corpus.chunks(place), self._encoder, num_workers):
                for side, part in encoded.parts.items():
                    self._writers[side].add(part.tokens, part.lengths, encoded.chunk.continues, part.counted)
                self._tally.add(encoded.tally)
                progress.update(encoded)
                if encoded.chunk.after and journal.due:
                    journal.write(self._so_far(encoded.chunk.after, progress.done), self._trained)
        records = self._encoder.records
        for side, writer in self._writers.items():
            if records and writer.num_tokens:  # A sample reads the token after its sequence as well.
                end = np.array([self._encoder.tokenizer.eos_id])
                writer.add(end, np.array([1]), counted=np.zeros(1, bool))
            writer.finish()
            self._tally.counts[side].documents = writer.num_documents - (records is not None)
            if writer.num_documents == 0:
                journal.discard()
                why = self._tally.why_nothing(side, records, self._encoder.valid_fraction)
                raise ConfigError(
                    f"{writer.path}: no document with text went into this file{why}; nothing is written; the "
                    f"source was {self._corpus.named}"
                )

    def publish(self, request: Request) -> None:
        """Give the files their names, the tokenizer first."""
        # The journal says whose the tokenizer is until the token files do.
        if self._trained and not self.journal.exists:
            self.journal.write(self._begun, self._trained)
        tokenizer = self._encoder.tokenizer
        file = self._there.folder / tokenizer.file_name
        with writing(file):
            if not (file.is_file() and self._is_kept(file, request)):
                tokenizer.write(self._there.folder)
        for side in reversed(list(self._writers)):
            self._writers[side].publish(self._provenance(side, request.source_texts))
        self.journal.discard()

    def sentences(self) -> Iterator[str]:
        """Yield sentences about what was written, and how a run reads it."""
        yield from self._there.sentences()
        yield from self._tally.sentences(self._there.outputs, self._encoder.records, self._encoder.prefix)

    def _is_kept(self, file: Path, request: Request) -> bool:
        """Whether the tokenizer file that is there stays: the one that was given, or the same SentencePiece model,
        which may have a chat template of another call beside it."""
        if not self._trained and Path(request.tokenizer or file).resolve() == file.resolve():
            return True
        tokenizer = self._encoder.tokenizer
        return not tokenizer.config and parted(file.read_bytes())[0] == tokenizer.model

    def _so_far(self, place: Place, done: int) -> Unfinished:
        counts = {side: asdict(each) for side, each in self._tally.counts.items()}
        written = {side: writer.written() for side, writer in self._writers.items()}
        tokenizer = self._encoder.tokenizer.sha256
        notes = [(*about, count) for about, count in self._tally.notes.items()]
        return Unfinished(self._made_from, tokenizer, place, done, counts, written, self._tally.first_bad, notes)

    def _provenance(self, side: str, sources: Sequence[str]) -> dict[str, Any]:
        writer, records, tokenizer = self._writers[side], self._encoder.records, self._encoder.tokenizer
        of_records = {"counted_tokens", "padding_tokens", "cut_records", "too_long_records"}
        counts = asdict(self._tally.counts[side])
        return {
            "sources": list(sources),
            **{name: value for name, value in counts.items() if records or name not in of_records},
            **({"seq_length": records.seq_length, "mask_sha256": writer.mask_sha256} if records else {}),
            **({CHAT_TEMPLATE: records.named_templates} if isinstance(records, Chats) else {}),
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
            "tokenizer_sha256": tokenizer.sha256,
            "dtype": writer.dtype.name,
            "sha256": writer.sha256,
            "request": self._made_from,
        }
