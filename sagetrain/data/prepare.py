"""`sagetrain prepare`: text in, token files and tokenizer out.

One process reads, several turn text into tokens, and the results are written in the order of reading: the files are the
same bytes whatever the number of workers. Memory does not grow with the corpus. A call that was interrupted is gone on
with by the next one (journal.py).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sagetrain.config.errors import ConfigError
from sagetrain.config.rules.data import CHAT_TEMPLATE
from sagetrain.config.schema import TOKENIZER_JSON, TOKENIZER_NAME, tokenizer_in
from sagetrain.data.chunk import Place
from sagetrain.data.counts import Counts, Tally, many
from sagetrain.data.destination import Destination
from sagetrain.data.encode import Encoder, encode
from sagetrain.data.journal import Journal, Unfinished
from sagetrain.data.progress import Progress
from sagetrain.data.records import Chats, Notes, Records, settled
from sagetrain.data.sources import Corpus
from sagetrain.data.token_file import (
    TokenFileWriter,
    alone_in,
    check_writable,
    read_provenance,
    token_path,
    write_atomic,
    writing,
)
from sagetrain.data.tokenizer import Tokenizer, train_tokenizer
from sagetrain.data.tokenizer_copy import says_more

_MIN_VOCAB_SIZE = 256 + 3 + 1
_MAX_VOCAB_SIZE, _MAX_WORKERS = 1_000_000, 1024


@dataclass(frozen=True)
class Prepared:
    """Result of `prepare`."""

    train: Path
    """Path of the token file, as data.train[].path takes it."""
    valid: Path | None
    """Path of the held-out token file, if one was asked for."""
    tokenizer: Path
    counts: dict[str, Counts]
    """By "train" and "valid"."""
    vocab_size: int
    seconds: float
    already_there: bool
    """An earlier call with the same inputs had written everything; nothing was done."""


def prepare(
    sources: list[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    tokenizer_sample: int = 100_000_000,
    text_key: str = "text",
    records: Records | None = None,
    glob: str | None = None,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    valid_fraction: float = 0.0,
    num_workers: int = 1,
    overwrite: bool = False,
    skip_bad_lines: bool = False,
    shard: str | None = None,
    split_on: str | None = None,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Prepared:
    """Turn text into a token file at `output` (.bin, .idx, .json), with its tokenizer in the same folder:
    tokenizer.model (SentencePiece) or tokenizer.json (Hugging Face).

    Args:
        sources: files (.jsonl or .ndjson, .json, .csv, .tsv, .parquet, text; .gz, .bz2, .xz and .zst too), folders,
            archives (.tar, .tar.gz and the like, .zip), Hugging Face datasets (hub name, or a folder written by
            save_to_disk), or "python-stdlib". Read in this order.
        output: path of the token file without suffix, e.g. data/train.
        tokenizer: an existing SentencePiece model, or a tokenizer.json with its tokenizer_config.json beside it.
            Default: the one in the output's folder.
        vocab_size: train a new tokenizer of this size first.
        tokenizer_sample: characters of the corpus that a new tokenizer is trained on.
        text_key: field or column that holds the text.
        records: prompts with completions, or chats, instead of text; a loss mask (.mask) says what of them counts.
        glob: which files of a folder or archive, e.g. "**/*.md". Default: its JSON and Parquet files, or else its plain
            text, or its tables and archives if these are more.
        dataset_config, dataset_split: which part of a Hugging Face dataset.
        valid_fraction: share of the documents, chosen by a hash of their text, that goes to the token file `valid` in
            the output's folder instead.
        num_workers: processes that turn text into tokens; 1 does it in this process.
        overwrite: replace existing files that were made from something else, the folder's tokenizer too.
        skip_bad_lines: leave out and count lines and rows that hold no text, instead of stopping at the first.
        shard: "K/N" prepares the K-th of N parts of the text, alike in bytes, as NAME-0000K-of-0000N: each of N hosts
            does one, and `path: NAME-*` trains on all. Lines are divided, other files are whole in one of the parts;
            a saved dataset is divided by rows, a streamed one by its files.
        split_on: what stands between the documents of a plain text file, e.g. "<|endoftext|>" or "\\n\\n". Default: a
            plain text file is one document.
        say: gets messages for people.

    Raises:
        ConfigError: for everything that the caller can put right.

    An interrupted call leaves only *.partial files, and calling again with the same arguments goes on where it was
    recorded last, every ten seconds or so; num_workers may change. A call whose result is already there, from the same
    inputs, returns at once.
    """
    begin = time.perf_counter()
    if os.fspath(output).endswith("/") or Path(output).is_dir():
        raise ConfigError(f"output {output} is a folder: name the token file in it, e.g. -o {Path(output) / 'train'}")
    there = Destination(Path(output), _parse_shard(shard) if shard else None, valid_fraction > 0)
    check_writable(there.named)
    _check_arguments(there.named, tokenizer, vocab_size, valid_fraction, num_workers)
    fields = (records.fields, records.optional_fields) if records else ((), ())
    corpus = Corpus(
        sources, text_key, glob, dataset_config, dataset_split, skip_bad_lines, there.division, *fields, split_on
    )
    if valid_fraction and len(corpus.inputs) == 1 and corpus.inputs[0].one_document:
        raise ConfigError(
            f"{corpus.inputs[0].name}: --valid-fraction {valid_fraction} needs several documents, and a plain text "
            "file is one document: say what stands between documents (--split-on), or write it as .jsonl, where each "
            'line is a document ({"text": "..."}), or leave out --valid-fraction'
        )
    given = None if vocab_size else Tokenizer.load(tokenizer or tokenizer_in(there.folder))
    if records:
        if given is None:
            raise ConfigError(
                "records are for a model that has a tokenizer: give it (--tokenizer), and no --vocab-size"
            )
        records = settled(records, given)
    prefix = given.prefix if given and not (records and records.templated) else []
    file_name = given.file_name if given else TOKENIZER_NAME
    request = (
        {
            "inputs": len(corpus.all_inputs),
            "inputs_sha256": corpus.identity(),
            "text_key": text_key,
            "valid_fraction": valid_fraction,
            "tokenizer": given.sha256 if given else [vocab_size, tokenizer_sample],
        }
        | ({"skip_bad_lines": True} if skip_bad_lines else {})
        | ({"shard": list(there.division)} if there.division else {})
        | ({"split_on": split_on} if split_on is not None else {})
        | ({"text_key": None, "records": records.request} if records else {})
        | ({"prefix": prefix} if prefix else {})
    )
    with _claimed(there.outputs) as writers:
        journal = Journal(there.train)
        if not overwrite and there.holds(request, file_name):
            journal.discard()
            say(f"{there.train}: already prepared from the same inputs")
            return _result(there, file_name, begin, True)
        unfinished = journal.read(request, overwrite)
        if not overwrite:
            there.check_tokenizer(request)
        notes = [] if overwrite else there.check_parts(request)
        there.check_held_out(sources, request)

        for note in [*(given.notes if given else ()), *corpus.notes, *notes]:
            say(note)
        if given:
            model = given.model
        elif unfinished:
            model = journal.tokenizer(unfinished)
        else:
            assert vocab_size, "_check_arguments wants this one or a tokenizer"
            say(f"training a tokenizer of {vocab_size:,} tokens")
            model = train_tokenizer(corpus.sample(tokenizer_sample), vocab_size)
            say(f"trained the tokenizer in {time.perf_counter() - begin:.0f} s")
        encoder = Encoder(model, text_key, valid_fraction, skip_bad_lines, records, prefix)
        there.check_siblings(encoder.tokenizer)
        if unfinished and not all(token_path(path, ".bin.partial").exists() for path in there.outputs.values()):
            unfinished = None  # interrupted between the renames at its very end: written once more
        call = _Call(request, corpus, encoder, writers, journal, None if given else model, unfinished)
        if unfinished:
            where = corpus.inputs[unfinished.place.input].name
            say(f"{there.train}: going on after {many(call.tally.tokens, 'token')}, in {where}")
        try:
            call.write(num_workers)
            with alone_in(there.folder):  # by now other calls may have written, or are about to
                there.check_siblings(encoder.tokenizer)
                for note in set() if overwrite else set(there.check_parts(request)) - set(notes):
                    say(note)
                call.publish(there.folder / file_name, sources)
        finally:
            if journal.exists:
                say(f"{there.train}: unfinished; the same command goes on with it")
    if there.division:
        number, count = there.division
        say(f"part {number} of {count}; train on all of them by data.train path: {there.named}-*")
    if prefix:
        what = f"token{'s' * (len(prefix) > 1)} {', '.join(map(str, prefix))}"
        say(f"each {'record' if records else 'document'} begins with {what}, which the tokenizer puts before a text")
    for line in call.tally.sentences(there.outputs, records):
        say(line)
    return _result(there, file_name, begin, False)


class _Call:
    """The text of a corpus into token files, from where an earlier call was interrupted, and recorded on the way."""

    def __init__(
        self,
        request: dict[str, Any],
        corpus: Corpus,
        encoder: Encoder,
        writers: Mapping[str, TokenFileWriter],
        journal: Journal,
        trained: bytes | None,
        unfinished: Unfinished | None,
    ):
        """trained: the tokenizer, if it was trained for these files."""
        self.tally = Tally(writers)
        self._request, self._corpus, self._encoder, self._writers = request, corpus, encoder, writers
        self._journal, self._trained = journal, trained
        place, done = Place(), 0
        if unfinished:
            place, done = unfinished.place, unfinished.progress
            self.tally.counts = {side: Counts(**recorded) for side, recorded in unfinished.counts.items()}
            self.tally.first_bad = unfinished.first_bad
            self.tally.notes = Notes({(sentence, key): count for sentence, key, count in unfinished.notes})
        for side, writer in writers.items():
            written = unfinished.written[side] if unfinished else None
            writer.begin(encoder.tokenizer.vocab_size, written, masked=encoder.records is not None)
        self._begun = self._so_far(place, done)

    def write(self, num_workers: int) -> None:
        """All that is left of the text, into files that have no name yet."""
        place, journal = self._begun.place, self._journal
        if journal.exists or journal.due:  # due: training the tokenizer took long
            journal.write(self._begun, self._trained)
        with Progress(self._corpus, place, self._begun.progress) as progress:
            for encoded in encode(self._corpus.chunks(place), self._encoder, num_workers):
                for side, part in encoded.parts.items():
                    self._writers[side].add(part.tokens, part.lengths, encoded.continues, part.counted)
                self.tally.add(encoded)
                progress.update(encoded)
                if encoded.after and journal.due:
                    journal.write(self._so_far(encoded.after, progress.done), self._trained)
        records = self._encoder.records
        for side, writer in self._writers.items():
            if records and writer.num_tokens:  # what follows the last sequence is read too
                end = np.array([self._encoder.tokenizer.eos_id])
                writer.add(end, np.array([1]), counted=np.zeros(1, bool))
            writer.finish()
            self.tally.counts[side].documents = writer.num_documents - (records is not None)
            if writer.num_documents == 0:
                journal.discard()
                why = self.tally.why_nothing(side, records, self._encoder.valid_fraction)
                raise ConfigError(f"{writer.path}: no document with text went into this file{why}; nothing is written")

    def publish(self, tokenizer: Path, sources: list[str]) -> None:
        """Give the files their names, the tokenizer's first: `tokenizer`."""
        if self._trained and not self._journal.exists:  # says whose the tokenizer is until the token files do
            self._journal.write(self._begun, self._trained)
        with writing(tokenizer):
            if not (tokenizer.is_file() and says_more(tokenizer.read_bytes(), self._encoder.model)):
                write_atomic(tokenizer, self._encoder.model)
            for name in {TOKENIZER_NAME, TOKENIZER_JSON} - {tokenizer.name}:  # there is one in a folder
                tokenizer.with_name(name).unlink(missing_ok=True)
        for side in reversed(list(self._writers)):
            self._writers[side].publish(self._provenance(side, sources))
        self._journal.discard()

    def _so_far(self, place: Place, done: int) -> Unfinished:
        counts = {side: asdict(each) for side, each in self.tally.counts.items()}
        written = {side: writer.written() for side, writer in self._writers.items()}
        tokenizer = self._encoder.tokenizer.sha256
        notes = [(*about, count) for about, count in self.tally.notes.items()]
        return Unfinished(self._request, tokenizer, place, done, counts, written, self.tally.first_bad, notes)

    def _provenance(self, side: str, sources: list[str]) -> dict[str, Any]:
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
            "request": self._request,
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
    """Their writers: no other process may write there meanwhile, nor change what is recorded of an unfinished call."""
    writers: dict[str, TokenFileWriter] = {}
    try:
        for side, path in outputs.items():
            writers[side] = TokenFileWriter(path)
        yield writers
    finally:
        kept = Journal(outputs["train"]).exists
        for writer in reversed(list(writers.values())):  # the first may have made the folder
            writer.abort(keep=kept)


def _check_arguments(
    output: Path, tokenizer: Any, vocab_size: int | None, valid_fraction: float, num_workers: int
) -> None:
    if output.suffix in (".bin", ".idx") or not output.name:
        raise ConfigError(f"output {output}: give a path without .bin/.idx, e.g. data/train")
    if vocab_size is not None and vocab_size < _MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size} is below {_MIN_VOCAB_SIZE} (256 bytes, 3 control tokens, one character): "
            "give a larger one, e.g. 32000"
        )
    if vocab_size is not None and vocab_size > _MAX_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size} is above {_MAX_VOCAB_SIZE}, larger than any vocabulary in use: give a smaller "
            "one, e.g. 32000"
        )
    if tokenizer and vocab_size:
        raise ConfigError("give either --tokenizer or --vocab-size to train one, not both")
    if not tokenizer and not vocab_size and not tokenizer_in(output.parent).is_file():
        raise ConfigError(
            f"there is no {TOKENIZER_NAME} in {output.parent}: give --tokenizer, or --vocab-size to train one"
        )
    if not 0 <= valid_fraction < 1:
        raise ConfigError(f"--valid-fraction {valid_fraction} is not in [0, 1)")
    if valid_fraction and output.name == "valid":
        raise ConfigError(
            "the held-out file is named valid, so the output (-o) needs another name with --valid-fraction"
        )
    if not 1 <= num_workers <= _MAX_WORKERS:
        raise ConfigError(f"--workers {num_workers} is not from 1 to {_MAX_WORKERS}: one for each core is enough")


def _parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--shard {text}: give K/N, part K of N, counted from 1: --shard 1/8")
    return number, count
