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
from typing import Any, NoReturn

import numpy as np

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import TOKENIZER_JSON, TOKENIZER_NAME, tokenizer_in
from sagetrain.data.chunk import Place
from sagetrain.data.encode import Encoded, Encoder, encode
from sagetrain.data.journal import Journal, Unfinished, differences, in_words, of_one_whole, recorded_tokenizers
from sagetrain.data.progress import Progress
from sagetrain.data.records import Records, settled
from sagetrain.data.sources import Corpus
from sagetrain.data.token_file import (
    TokenFile,
    TokenFileWriter,
    alone_in,
    check_writable,
    read_provenance,
    token_path,
    write_atomic,
    writing,
)
from sagetrain.data.tokenizer import Tokenizer, sha256_of, train_tokenizer

_MIN_VOCAB_SIZE = 256 + 3 + 1
_MAX_VOCAB_SIZE, _MAX_WORKERS = 1_000_000, 1024


@dataclass
class Counts:
    """What went into one token file."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """UTF-8 bytes of text."""
    empty_documents: int = 0
    """Left out: no text, or nothing but white space. Not part of `documents`."""
    bad_lines: int = 0
    """Left out with skip_bad_lines."""
    counted_tokens: int = 0
    """Of records: those that count in the loss."""
    padding_tokens: int = 0
    """Those between records."""
    cut_records: int = 0
    """Longer than a sequence, and cut at its end."""
    too_long_records: int = 0
    """Left out: their completion begins behind the end of a sequence. Not part of `documents`."""


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
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Prepared:
    """Turn text into a token file at `output` (.bin, .idx, .json), with its tokenizer in the same folder:
    tokenizer.model (SentencePiece) or tokenizer.json (Hugging Face).

    Args:
        sources: files (.jsonl or .ndjson, .parquet, text; .gz and .zst too), folders, Hugging Face datasets (hub name,
            or a folder written by save_to_disk), or "python-stdlib". Read in this order.
        output: path of the token file without suffix, e.g. data/train.
        tokenizer: an existing SentencePiece model, or a tokenizer.json with its tokenizer_config.json beside it.
            Default: the one in the output's folder.
        vocab_size: train a new tokenizer of this size first.
        tokenizer_sample: characters of the corpus that a new tokenizer is trained on.
        text_key: field or column that holds the text.
        records: prompts with completions, or chats, instead of text; a loss mask (.mask) says what of them counts.
        glob: which files of a folder, e.g. "**/*.md". Default: its JSON and Parquet files, or else all files.
        dataset_config, dataset_split: which part of a Hugging Face dataset.
        valid_fraction: share of the documents, chosen by a hash of their text, that goes to the token file `valid` in
            the output's folder instead.
        num_workers: processes that turn text into tokens; 1 does it in this process.
        overwrite: replace existing files that were made from something else, the folder's tokenizer too.
        skip_bad_lines: leave out and count lines and rows that hold no text, instead of stopping at the first.
        shard: "K/N" prepares the K-th of N parts of the text, alike in bytes, as NAME-0000K-of-0000N: each of N hosts
            does one, and `path: NAME-*` trains on all. Lines are divided, other files are whole in one of the parts;
            a saved dataset is divided by rows, a streamed one by its files.
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
    output = Path(output)
    check_writable(output)
    _check_arguments(output, tokenizer, vocab_size, valid_fraction, num_workers)
    division = _parse_shard(shard) if shard else None
    fields = records.fields if records else ()
    corpus = Corpus(sources, text_key, glob, dataset_config, dataset_split, skip_bad_lines, division, fields)
    if valid_fraction and len(corpus.inputs) == 1 and corpus.inputs[0].one_document:
        raise ConfigError(
            f"{corpus.inputs[0].name}: --valid-fraction {valid_fraction} needs several documents, and a plain text "
            "file is one document: split it into several files, or write it as .jsonl, where each line is a document "
            '({"text": "..."}), or leave out --valid-fraction'
        )
    ending = "-{:05}-of-{:05}".format(*division) if division else ""
    named, output, held_out = output, output.with_name(f"{output.name}{ending}"), output.with_name(f"valid{ending}")
    outputs = {"train": output} | ({"valid": held_out} if valid_fraction else {})
    given = None if vocab_size else Tokenizer.load(tokenizer or tokenizer_in(output.parent))
    if records:
        if given is None:
            raise ConfigError(
                "records are for a model that has a tokenizer: give it (--tokenizer), and no --vocab-size"
            )
        records = settled(records, given)
    prefix = given.prefix if given and not (records and records.templated) else []
    model_path = output.parent / (given.file_name if given else TOKENIZER_NAME)
    request = (
        {
            "inputs": len(corpus.all_inputs),
            "inputs_sha256": corpus.identity(),
            "text_key": text_key,
            "valid_fraction": valid_fraction,
            "tokenizer": given.sha256 if given else [vocab_size, tokenizer_sample],
        }
        | ({"skip_bad_lines": True} if skip_bad_lines else {})
        | ({"shard": list(division)} if division else {})
        | ({"text_key": None, "records": records.request} if records else {})
        | ({"prefix": prefix} if prefix else {})
    )
    with _claimed(outputs) as writers:
        journal = Journal(output)
        if _already_there(outputs, model_path, request, overwrite):
            journal.discard()
            say(f"{output}: already prepared from the same inputs")
            return _result(outputs, model_path, begin, True)
        unfinished = journal.read(request, overwrite)
        if not overwrite:
            _check_model(outputs, model_path, request)
        notes = _check_parts(named, output, request) if division and not overwrite else []
        if "valid" not in outputs and output != held_out:
            _check_held_out(output, held_out, sources, request)

        for note in corpus.notes + notes:
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
        _check_siblings(output.parent, outputs, encoder.tokenizer)

        counts = {side: Counts() for side in outputs}
        place, first_bad = Place(), None
        if unfinished and not all(token_path(path, ".bin.partial").exists() for path in outputs.values()):
            unfinished = None  # interrupted between the renames at its very end: written once more
        if unfinished:
            counts = {side: Counts(**recorded) for side, recorded in unfinished.counts.items()}
            place, first_bad = unfinished.place, unfinished.first_bad
            say(f"{output}: going on after {_tokens(counts)}, in {corpus.inputs[place.input].name}")
        for side, writer in writers.items():
            written = unfinished.written[side] if unfinished else None
            writer.begin(encoder.tokenizer.vocab_size, written, masked=records is not None)

        def progressed(done: int) -> Unfinished:
            written = {side: writer.written() for side, writer in writers.items()}
            by_side = {side: asdict(each) for side, each in counts.items()}
            return Unfinished(request, encoder.tokenizer.sha256, place, done, by_side, written, first_bad)

        try:
            trained = None if given else model
            begun = progressed(unfinished.progress if unfinished else 0)
            if journal.exists or journal.due:  # due: training the tokenizer took long
                journal.write(begun, trained)
            with Progress(corpus, place, begun.progress) as progress:
                for encoded in encode(corpus.chunks(place), encoder, num_workers):
                    for side, part in encoded.parts.items():
                        writers[side].add(part.tokens, part.lengths, encoded.continues, part.counted)
                    _count(encoded, counts)
                    first_bad = first_bad or encoded.first_bad
                    progress.update(encoded)
                    if encoded.after and journal.due:
                        place = encoded.after
                        journal.write(progressed(progress.done), trained)
            for side, writer in writers.items():
                if records and writer.num_tokens:  # what follows the last sequence is read too
                    end = np.array([encoder.tokenizer.eos_id])
                    writer.add(end, np.array([1]), counted=np.zeros(1, bool))
                writer.finish()
                counts[side].documents = writer.num_documents - (records is not None)
                if writer.num_documents == 0:
                    journal.discard()
                    _nothing(side, writer, counts, records, first_bad, valid_fraction)
            with alone_in(output.parent):  # by now other calls may have written, or are about to
                _check_siblings(output.parent, outputs, encoder.tokenizer)
                if division and not overwrite:
                    for note in set(_check_parts(named, output, request)) - set(notes):
                        say(note)
                if trained and not journal.exists:  # says whose the tokenizer is until the token files do
                    journal.write(begun, trained)
                with writing(model_path):
                    write_atomic(model_path, model)
                    for name in {TOKENIZER_NAME, TOKENIZER_JSON} - {model_path.name}:  # there is one in a folder
                        (output.parent / name).unlink(missing_ok=True)
                for side in reversed(list(writers)):
                    provenance = _provenance(sources, counts[side], encoder.tokenizer, writers[side], request, records)
                    writers[side].publish(provenance)
                journal.discard()
        finally:
            if journal.exists:
                say(f"{output}: unfinished; the same command goes on with it")
    if division:
        say(f"part {division[0]} of {division[1]}; train on all of them by data.train path: {named}-*")
    if prefix:
        what = f"token{'s' * (len(prefix) > 1)} {', '.join(map(str, prefix))}"
        say(f"each {'record' if records else 'document'} begins with {what}, which the tokenizer puts before a text")
    for line in _said(outputs, counts, records, first_bad):
        say(line)
    return _result(outputs, model_path, begin, False)


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


def _nothing(
    side: str,
    writer: TokenFileWriter,
    counts: Mapping[str, Counts],
    records: Records | None,
    first_bad: str | None,
    valid_fraction: float,
) -> NoReturn:
    """ConfigError for a token file without a document."""
    bad = f" ({_many(counts['train'].bad_lines, 'bad line')}, the first: {first_bad})" if first_bad else ""
    if records and counts["train"].too_long_records:
        bad += f" ({_too_long(counts['train'], records)})"
    if side == "valid":
        bad += f": --valid-fraction {valid_fraction:g} of {_many(counts['train'].documents, 'document')}"
        bad += " took none, use a larger one"
    raise ConfigError(f"{writer.path}: no document with text went into this file{bad}; nothing is written")


def _count(encoded: Encoded, counts: Mapping[str, Counts]) -> None:
    """Add a chunk; what is left out counts in `train`."""
    for side, part in encoded.parts.items():
        counts[side].tokens += len(part.tokens)
        counts[side].bytes += part.bytes
        if part.counted is not None:
            counts[side].counted_tokens += int(part.counted.sum())
            counts[side].padding_tokens += part.padding
    counts["train"].empty_documents += encoded.empty_documents
    counts["train"].bad_lines += encoded.bad_lines
    counts["train"].cut_records += encoded.cut
    counts["train"].too_long_records += encoded.too_long


def _said(
    outputs: Mapping[str, Path], counts: Mapping[str, Counts], records: Records | None, first_bad: str | None
) -> Iterator[str]:
    """What was written, and what was left out."""
    for side, path in outputs.items():
        found = counts[side]
        yield f"{path}: {found.tokens:,} tokens, {_many(found.documents, 'document')}"
        if records:
            share, padding = (each / found.tokens for each in (found.counted_tokens, found.padding_tokens))
            yield f"{path}: {share:.1%} of the tokens count in the loss, {padding:.1%} are padding between records"
    train = counts["train"]
    if records and train.cut_records:
        yield f"cut {_many(train.cut_records, 'record')} after {records.seq_length:,} tokens (--seq-length)"
    if records and train.too_long_records:
        yield f"left out {_too_long(train, records)}"
    if train.empty_documents:
        yield f"left out {_many(train.empty_documents, 'empty document')}"
    if first_bad:
        yield f"left out {_many(train.bad_lines, 'bad line')}, the first: {first_bad}"


# -- before and after --------------------------------------------------------------------------------------------------


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


def _already_there(outputs: dict[str, Path], model_path: Path, request: dict[str, Any], overwrite: bool) -> bool:
    """Whether all files exist and come from this request. ConfigError if files of another request are in the way."""
    if overwrite:
        return False
    existing = [path for path in outputs.values() if token_path(path, ".idx").exists()]
    for path in existing:
        if read_provenance(path).get("request") != request:
            raise ConfigError(
                f"token file {path} exists and was prepared from other inputs or settings: "
                "choose another output (-o), delete it, or replace it with --overwrite"
            )
        TokenFile(path)  # raises if it is damaged
    return len(existing) == len(outputs) and model_path.is_file()


def _check_model(outputs: dict[str, Path], model_path: Path, request: dict[str, Any]) -> None:
    """ConfigError if the folder's tokenizer would be replaced by another one: checkpoints need the old one."""
    there = tokenizer_in(model_path.parent)
    if not there.is_file():
        return
    theirs = sha256_of(there.read_bytes())
    # An interrupted call with this request may have left the tokenizer that it trained, and one of two token files. Or
    # another host finishes its part: its record goes when its token files say the same, so it is read before them.
    unfinished = recorded_tokenizers(model_path.parent, request)
    paths = {path.with_suffix("") for path in model_path.parent.glob("*-of-*.idx")} | set(outputs.values())
    records = [read_provenance(path) for path in paths]
    known = [each["tokenizer_sha256"] for each in records if of_one_whole(each.get("request", {}), request)]
    if theirs not in [request["tokenizer"], *unfinished, *known]:
        raise ConfigError(
            f"{there} exists and would be replaced by another tokenizer; models trained with it could not be used "
            f"any more. Write to another folder (-o), keep it with --tokenizer {there} and no --vocab-size, or "
            "replace it with --overwrite"
        )


def _check_held_out(output: Path, valid: Path, sources: list[str], request: dict[str, Any]) -> None:
    """ConfigError if a `valid` beside the output holds documents that would now be in the output as well."""
    idx = token_path(valid, ".idx")
    if not idx.exists():
        return
    record = read_provenance(valid)
    theirs = record.get("request", {})
    # Its own train file replaced from a source that has changed since: most documents are the same.
    same_split = read_provenance(output).get("request") == theirs and set(sources) & set(record.get("sources", ()))
    if theirs.get("inputs_sha256") == request["inputs_sha256"] or same_split:
        raise ConfigError(
            f"{idx} was prepared from the same inputs, and its documents would now be in {output} too: a validation "
            f"loss on it would mean nothing. Give --valid-fraction (it was {theirs['valid_fraction']}) and --overwrite "
            f"to write both again, or delete {valid}.bin, .idx and .json"
        )


def _check_parts(named: Path, output: Path, request: dict[str, Any]) -> list[str]:
    """ConfigError if `named`-* would hold parts of another whole: some documents would be there twice, others not.
    What is to be said of parts that may be."""
    notes = []
    part = re.compile(re.escape(named.name) + r"-\d{5}-of-(\d{5})")
    for path in sorted(file.with_suffix("") for file in named.parent.glob(f"{named.name}-*.json")):
        if path == output or not (found := part.fullmatch(path.name)):
            continue
        if not (made_from := read_provenance(path).get("request")):
            continue  # from elsewhere
        # Tokenizers are compared by what they are (_check_siblings): the first part may have trained it.
        differ = differences(made_from, request)
        differ = [key for key in differ if key not in ("shard", "tokenizer", "skip_bad_lines")]
        count = request["shard"][1]
        if (theirs := int(found[1])) != count or [key for key in differ if key != "inputs_sha256"]:
            what = in_words(differ) if theirs == count else f"{theirs} parts instead of {count}"
            raise ConfigError(
                f"{path}.json is of another preparation ({what}), and {named}-* would read both: choose another output "
                "(-o), delete the token files of the other one, or replace it part by part with --overwrite"
            )
        if differ:  # copies on several hosts have times of their own
            notes.append(f"{path.name} was made from inputs of other names, sizes or times; are they the same text?")
    return notes


def _check_siblings(folder: Path, outputs: dict[str, Path], tokenizer: Tokenizer) -> None:
    """The folder's tokenizer belongs to all its token files: do not take it away from another one."""
    for idx in sorted(folder.glob("*.idx")):
        path = idx.with_name(idx.name.removesuffix(".idx"))
        theirs = read_provenance(path).get("tokenizer_sha256")
        if path not in outputs.values() and theirs not in (None, tokenizer.sha256):
            raise ConfigError(
                f"{folder} holds {path.name}, prepared with another tokenizer: choose another folder (-o)"
            )


def _provenance(
    sources: list[str],
    counts: Counts,
    tokenizer: Tokenizer,
    writer: TokenFileWriter,
    request: dict[str, Any],
    records: Records | None,
) -> dict[str, Any]:
    of_records = {"counted_tokens", "padding_tokens", "cut_records", "too_long_records"}
    masked = {"seq_length": records.seq_length, "mask_sha256": writer.mask_sha256} if records else {}
    return {
        "sources": list(sources),
        **{name: value for name, value in asdict(counts).items() if records or name not in of_records},
        **masked,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id,
        "tokenizer_sha256": tokenizer.sha256,
        "dtype": writer.dtype.name,
        "sha256": writer.sha256,
        "request": request,
    }


def _result(outputs: dict[str, Path], model_path: Path, begin: float, already_there: bool) -> Prepared:
    recorded = {side: read_provenance(path) for side, path in outputs.items()}
    counts = {
        side: Counts(**{key: record.get(key, nothing) for key, nothing in asdict(Counts()).items()})
        for side, record in recorded.items()
    }
    seconds = time.perf_counter() - begin
    vocab_size = recorded["train"]["vocab_size"]
    return Prepared(outputs["train"], outputs.get("valid"), model_path, counts, vocab_size, seconds, already_there)


def _too_long(counts: Counts, records: Records) -> str:
    many = _many(counts.too_long_records, "record")
    return f"{many} in which nothing of the first {records.seq_length:,} tokens (--seq-length) counts"


def _tokens(counts: dict[str, Counts]) -> str:
    return _many(sum(each.tokens for each in counts.values()), "token")


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
