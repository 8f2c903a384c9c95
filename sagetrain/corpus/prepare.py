"""The command `sagetrain prepare`: text in, token files and tokenizer out.

One process reads, several turn text into tokens, and the results are written in the order of reading. The files are the
same bytes whatever the number of workers. Memory does not grow with the corpus. A call that was interrupted is
continued by the next one (journal.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sagetrain.config.errors import ConfigError, in_notebook, many
from sagetrain.config.rules.data import CHAT_TEMPLATE
from sagetrain.config.schema import TOKENIZER_JSON, TOKENIZER_NAME, tokenizer_in
from sagetrain.corpus.chunk import Place
from sagetrain.corpus.counts import Counts, Tally
from sagetrain.corpus.destination import Destination
from sagetrain.corpus.encode import Encoder, encode
from sagetrain.corpus.journal import Journal, Unfinished
from sagetrain.corpus.progress import Progress
from sagetrain.corpus.records import Chats, Notes, Records, settled
from sagetrain.corpus.request import Request
from sagetrain.corpus.sources import Corpus
from sagetrain.corpus.token_writer import TokenFileWriter, alone_in, writing
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.data.token_file import read_provenance, token_path, write_atomic
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import says_more


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`."""

    train: Path
    """The path of the token file, as data.train[].path takes it."""
    valid: Path | None
    """The path of the held-out token file, if one was asked for."""
    tokenizer: Path
    """The file of the tokenizer, beside the token file."""
    counts: dict[str, Counts]
    """The counts of the token files, by "train" and "valid"."""
    vocab_size: int
    """The number of tokens of the tokenizer."""
    seconds: float
    """The time that the call took."""
    already_there: bool
    """Whether an earlier call with the same inputs had written everything, so that nothing was done."""


def prepare(request: Request, hears: Callable[[str], None] | None = None) -> Prepared:
    """Turn text into a token file (.bin, .idx, .json), with its tokenizer in the same folder: tokenizer.model
    (SentencePiece) or tokenizer.json (Hugging Face).

    An interrupted call leaves only *.partial files. A call with the same request continues from the last record, which
    is made every ten seconds or so; num_workers may change. A call whose result already exists, from the same inputs,
    returns at once.

    Args:
        request: the text, the output and the settings.
        hears: gets messages for people. None: they go to stderr, with a progress bar.

    Returns:
        The paths and counts of what was written.

    Raises:
        ConfigError: for everything that the caller can put right.
    """
    begin, say = time.perf_counter(), hears or _to_stderr
    request.check()
    there = Destination.of(request)
    corpus = Corpus(request, there.division, request.records)
    corpus.check_split(request.valid_fraction)
    given = None if request.vocab_size else Tokenizer.load(request.tokenizer or tokenizer_in(there.folder))
    records = settled(request.records, given) if request.records else None
    prefix = given.prefix if given and not (records and records.templated) else []
    file_name = given.file_name if given else TOKENIZER_NAME
    made_from = _made_from(request, corpus, given, records, prefix)
    with _claimed(there.outputs) as writers:
        journal = Journal(there.train)
        if not request.overwrite and there.holds(made_from, file_name):
            journal.discard()
            say(f"{there.train}: already prepared from the same inputs")
            return _result(there, file_name, begin, True)
        unfinished = journal.read(made_from, request.overwrite)
        notes = there.check(request, made_from)
        for note in [*(given.notes if given else ()), *corpus.notes, *notes]:
            say(note)
        if given:
            model = given.model
        elif unfinished:
            model = journal.tokenizer(unfinished)
        else:
            say(f"training a tokenizer of {request.vocab_size:,} tokens")
            model = train_tokenizer(corpus.sample(request.tokenizer_sample), request.vocab_size or 0)
            say(f"trained the tokenizer in {time.perf_counter() - begin:.0f} s")
        encoder = Encoder(model, request.text_key, request.valid_fraction, request.skip_bad_lines, records, prefix)
        there.check_siblings(encoder.tokenizer)
        call = _Call(made_from, corpus, encoder, writers, journal, None if given else model, unfinished)
        if call.tally.tokens:
            say(f"{there.train}: going on after {many(call.tally.tokens, 'token')}, in {call.input}")
        try:
            call.write(request.num_workers, shown=hears is None or in_notebook())
            with alone_in(there.folder):  # By now other calls may have written there, or are about to.
                there.check_siblings(encoder.tokenizer)
                for note in set(there.check_parts(request, made_from)) - set(notes):
                    say(note)
                call.publish(there.folder / file_name, request.source_texts)
        finally:
            if journal.exists:
                say(f"{there.train}: unfinished; the same call or command goes on with it")
    for line in [*there.sentences(), *call.tally.sentences(there.outputs, records, prefix)]:
        say(line)
    return _result(there, file_name, begin, False)


def _made_from(
    request: Request, corpus: Corpus, given: Tokenizer | None, records: Records | None, prefix: list[int]
) -> dict[str, Any]:
    """Return what decides the content of the token files, as their record has it."""
    return (
        {
            "inputs": len(corpus.all_inputs),
            "inputs_sha256": corpus.identity(),
            "text_key": request.text_key,
            "valid_fraction": request.valid_fraction,
            "tokenizer": given.sha256 if given else [request.vocab_size, request.tokenizer_sample],
        }
        | ({"skip_bad_lines": True} if request.skip_bad_lines else {})
        | ({"shard": list(request.division)} if request.division else {})
        | ({"split_on": request.split_on} if request.split_on is not None else {})
        | ({"text_key": None, "records": records.request} if records else {})
        | ({"prefix": prefix} if prefix else {})
        | ({} if records and records.templated else {"control_tokens": True})
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Call:
    """The work of writing a corpus into token files. It continues where an earlier call was interrupted, and records
    its progress."""

    def __init__(
        self,
        made_from: dict[str, Any],
        corpus: Corpus,
        encoder: Encoder,
        writers: Mapping[str, TokenFileWriter],
        journal: Journal,
        trained: bytes | None,
        unfinished: Unfinished | None,
    ):
        """Open the writers, and restore the state of an unfinished call. `trained` is the tokenizer, if it was trained
        for these files."""
        self.tally = Tally(writers)
        self._made_from, self._corpus, self._encoder, self._writers = made_from, corpus, encoder, writers
        self._journal, self._trained = journal, trained
        place, done = Place(), 0
        if not all(token_path(writer.path, ".bin.partial").exists() for writer in writers.values()):
            # The call was interrupted between the renames at its very end, so the files are written once more.
            unfinished = None
        if unfinished:
            place, done = unfinished.place, unfinished.progress
            self.tally.counts = {side: Counts(**recorded) for side, recorded in unfinished.counts.items()}
            self.tally.first_bad = unfinished.first_bad
            self.tally.notes = Notes({(sentence, key): count for sentence, key, count in unfinished.notes})
        for side, writer in writers.items():
            written = unfinished.written[side] if unfinished else None
            writer.begin(encoder.tokenizer.vocab_size, written, masked=encoder.records is not None)
        self._begun = self._so_far(place, done)
        self.input = corpus.inputs[place.input].name
        """The name of the input that is read first."""

    def write(self, num_workers: int, shown: bool) -> None:
        """Write the rest of the text into files that do not have their names yet. `shown`: with a progress bar."""
        place, journal = self._begun.place, self._journal
        if journal.exists or journal.due:  # The journal may be due already if training the tokenizer took long.
            journal.write(self._begun, self._trained)
        with Progress(self._corpus, place, self._begun.progress, shown) as progress:
            for encoded in encode(self._corpus.chunks(place), self._encoder, num_workers):
                for side, part in encoded.parts.items():
                    self._writers[side].add(part.tokens, part.lengths, encoded.continues, part.counted)
                self.tally.add(encoded)
                progress.update(encoded)
                if encoded.after and journal.due:
                    journal.write(self._so_far(encoded.after, progress.done), self._trained)
        records = self._encoder.records
        for side, writer in self._writers.items():
            if records and writer.num_tokens:  # A sample reads the token after its sequence as well.
                end = np.array([self._encoder.tokenizer.eos_id])
                writer.add(end, np.array([1]), counted=np.zeros(1, bool))
            writer.finish()
            self.tally.counts[side].documents = writer.num_documents - (records is not None)
            if writer.num_documents == 0:
                journal.discard()
                why = self.tally.why_nothing(side, records, self._encoder.valid_fraction)
                raise ConfigError(f"{writer.path}: no document with text went into this file{why}; nothing is written")

    def publish(self, tokenizer: Path, sources: Sequence[str]) -> None:
        """Give the files their names, the tokenizer first.

        Args:
            tokenizer: path of the tokenizer file.
            sources: the sources of the text, for the record.
        """
        # The journal says whose the tokenizer is until the token files do.
        if self._trained and not self._journal.exists:
            self._journal.write(self._begun, self._trained)
        with writing(tokenizer):
            if not (tokenizer.is_file() and says_more(tokenizer.read_bytes(), self._encoder.model)):
                write_atomic(tokenizer, self._encoder.model)
            for name in {TOKENIZER_NAME, TOKENIZER_JSON} - {tokenizer.name}:  # A folder has one tokenizer.
                tokenizer.with_name(name).unlink(missing_ok=True)
        for side in reversed(list(self._writers)):
            self._writers[side].publish(self._provenance(side, sources))
        self._journal.discard()

    def _so_far(self, place: Place, done: int) -> Unfinished:
        counts = {side: asdict(each) for side, each in self.tally.counts.items()}
        written = {side: writer.written() for side, writer in self._writers.items()}
        tokenizer = self._encoder.tokenizer.sha256
        notes = [(*about, count) for about, count in self.tally.notes.items()]
        return Unfinished(self._made_from, tokenizer, place, done, counts, written, self.tally.first_bad, notes)

    def _provenance(self, side: str, sources: Sequence[str]) -> dict[str, Any]:
        writer, records, tokenizer = self._writers[side], self._encoder.records, self._encoder.tokenizer
        of_records = {"counted_tokens", "padding_tokens", "cut_records", "too_long_records"}
        counts = asdict(self.tally.counts[side])
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


def _result(there: Destination, tokenizer: str, begin: float, already_there: bool) -> Prepared:
    recorded = {side: read_provenance(path) for side, path in there.outputs.items()}
    return Prepared(
        there.train,
        there.outputs.get("valid"),
        there.folder / tokenizer,
        {side: Counts.recorded(record) for side, record in recorded.items()},
        recorded["train"]["vocab_size"],
        time.perf_counter() - begin,
        already_there,
    )


@contextmanager
def _claimed(outputs: Mapping[str, Path]) -> Iterator[dict[str, TokenFileWriter]]:
    """Yield the writers of all outputs. Until the end no other process may write there, or change the record of an
    unfinished call."""
    writers: dict[str, TokenFileWriter] = {}
    try:
        for side, path in outputs.items():
            writers[side] = TokenFileWriter(path)
        yield writers
    finally:
        kept = Journal(outputs["train"]).exists
        for writer in reversed(list(writers.values())):  # The first writer may have made the folder.
            writer.abort(keep=kept)
