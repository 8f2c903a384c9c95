"""Where text comes from: files, folders, Hugging Face datasets, the standard library. All read as a stream.

A corpus yields chunks: a few hundred kilobytes of consecutive documents that a worker turns into tokens. Reading runs
no code from the data: datasets are Arrow, Parquet, JSON or text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.data.blocks import blocks, lines
from sagetrain.data.blocks import ends as _ends

STDLIB = "python-stdlib"
CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 4096
_HASHED_BYTES = 1 << 16
_STRUCTURED = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl.zst", ".ndjson.zst",
               ".json.zst", ".parquet")  # fmt: skip
_STDLIB_LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests",
                    "turtledemo"}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """How far a corpus has been read."""

    input: int = 0
    """The input in hand; those before it have been read."""
    records: int = 0
    """Its records that have been read."""
    offset: int = 0
    """The byte after them where reading can begin there; 0: reading begins at the input's beginning and leaves them
    out, which costs far less than turning them into tokens."""


@dataclass
class Chunk:
    """Consecutive records of one input, as the reader hands them to a worker."""

    origin: str
    """File or dataset, for messages."""
    unit: str
    """What a record is: "line" (a JSON object), "row" (its text) or "file" (its bytes, or a part of them)."""
    first: int
    """Number of the first record, from 1."""
    records: list[Any]
    """bytes for lines and files; str, None or something wrong for rows."""
    consumed: int = 0
    """Bytes of the input that had been read when the chunk was complete."""
    split_key: bytes | None = None
    """Beginning of the file whose part this is; decides its side of a train/valid split."""
    continues: bool = False
    """The first record is the rest of the document that the chunk before left unfinished."""
    unfinished: bool = False
    """The document of the last record goes on in the next chunk."""
    offset: int = 0
    """As in Place, where the chunk ends."""
    after: Place | None = None
    """What has been read with this chunk; None inside of a document."""

    def texts(self, text_key: str, skip_bad: bool = False) -> Iterator[str | ConfigError | None]:
        """The records' texts in order; None stands for an empty document.

        A line or row without text in it is a ConfigError that names file and record: raised, or with `skip_bad` given
        in the text's place.
        """
        for number, record in enumerate(self.records, self.first):
            if self.unit == "line" and not record.strip():
                continue  # a blank line is no document
            try:
                yield self._text(record, number, text_key)
            except ConfigError as error:
                if not skip_bad or self.unit == "file":
                    raise
                yield error

    def _text(self, record: Any, number: int, text_key: str) -> str | None:
        if isinstance(record, bytes):
            record = self._decode(record, number)
            if self.unit == "line":
                record = self._text_of(record, number, text_key)
        if record is None:
            return None
        if not isinstance(record, str):
            raise self.error(number, f"{text_key!r} holds {type(record).__name__}, not text")
        try:
            record.encode()
        except UnicodeEncodeError as error:
            raise self.error(number, f"not valid Unicode: a lone surrogate at character {error.start}") from error
        # A part of a longer document counts even if it is blank.
        blank = not record or record.isspace()
        return None if blank and not (self.continues or self.unfinished) else record

    def error(self, number: int, what: str) -> ConfigError:
        """A mistake in record `number`."""
        return ConfigError(f"{self.origin}{'' if self.unit == 'file' else f', {self.unit} {number:,}'}: {what}")

    def _decode(self, record: bytes, number: int) -> str:
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            hint = "; if it is no text file, choose the files with --glob" if self.unit == "file" else ""
            raise self.error(number, f"not UTF-8 (byte {record[error.start]:#04x}){hint}") from error

    def _text_of(self, line: str, number: int, text_key: str) -> Any:
        try:
            value = json.loads(line)
        except ValueError as error:
            hint = " (a JSON array? write one object per line)" if number == 1 and line.startswith("[") else ""
            raise self.error(number, f"not valid JSON: {error}{hint}") from error
        if not isinstance(value, dict):
            raise self.error(number, f"holds {type(value).__name__}, not a JSON object")
        if text_key not in value:
            raise self.error(number, no_such_key(text_key, value))
        return value[text_key]


def no_such_key(text_key: str, keys: Iterable[str]) -> str:
    """Message for a missing text key."""
    return f"no key {text_key!r}; the keys are: {', '.join(keys) or 'none'}. Choose one with --text-key"


@dataclass
class Input:
    """One file or dataset: how to read it, how large it is, what makes it the same one next time."""

    name: str
    read: Callable[[Place], Iterator[Chunk]]
    """Chunks of the input; those of a place's records may be left out."""
    size: int | None
    """Bytes on disk, for the progress bar; None: unknown."""
    identity: list[Any]
    one_document: bool = False
    """A plain text file."""
    part: Callable[[int, int], Input] | None = None
    """The lines that begin at bytes start to stop - 1 of it; None: it is read whole."""


class Corpus:
    """Everything that one `prepare` reads, in order."""

    def __init__(
        self,
        sources: list[str],
        text_key: str = "text",
        glob: str | None = None,
        config_name: str | None = None,
        split: str = "train",
        skip_bad_lines: bool = False,
        shard: tuple[int, int] | None = None,
    ):
        """Resolve `sources`: files, folders (recursive, `glob` chooses), dataset names, or "python-stdlib".

        `config_name` and `split` are for Hugging Face datasets; `skip_bad_lines` is for `sample`. With `shard` (K, N)
        the inputs are the K-th of N parts, alike in bytes. ConfigError if a source does not exist or is empty.
        """
        if not sources:
            raise ConfigError("no source of text given")
        self.text_key, self._skip_bad = text_key, skip_bad_lines
        self.notes: list[str] = []
        self.inputs: list[Input] = []
        for source in sources:
            self.inputs += self._resolve(source, glob, config_name, split)
        self.all_inputs = self.inputs
        if shard:
            self.inputs = _part(self.inputs, *shard)

    def chunks(self, start: Place = Place()) -> Iterator[Chunk]:
        """What comes after `start`."""
        for number, each in enumerate(self.inputs[start.input :], start.input):
            place = start if number == start.input else Place(number)
            for chunk in each.read(place):
                known = place.records - chunk.first + 1
                if known >= len(chunk.records):
                    continue
                if known > 0:
                    chunk.first, chunk.records = chunk.first + known, chunk.records[known:]
                if not chunk.unfinished:
                    chunk.after = Place(number, chunk.first + len(chunk.records) - 1, chunk.offset)
                yield chunk

    @property
    def size(self) -> int | None:
        """Bytes on disk of all inputs, if known."""
        sizes = [each.size for each in self.inputs]
        return None if None in sizes else sum(sizes)

    def identity(self) -> str:
        """A hash of the names, sizes and modification times of all inputs, whatever the part."""
        return sha256(json.dumps([each.identity for each in self.all_inputs]).encode()).hexdigest()

    def sample(self, max_characters: int) -> Iterator[str]:
        """Texts from the beginnings of all inputs, about `max_characters` together; deterministic, whatever the part.

        Each input gives an equal share. If there are too many for that, a pseudo-random choice of them gives more.
        """
        share = max(max_characters // len(self.all_inputs), CHUNK_BYTES)
        left = max_characters
        for each in sorted(self.all_inputs, key=lambda each: blake2b(each.name.encode()).digest()):
            from_this = 0
            for chunk in each.read(Place()):
                for text in chunk.texts(self.text_key, self._skip_bad):
                    if isinstance(text, str) and from_this < share and left > 0:
                        text = text[: min(share - from_this, left)]
                        from_this, left = from_this + len(text), left - len(text)
                        yield text
                if from_this >= share or left <= 0:
                    break
            if left <= 0:
                return

    def _resolve(self, source: str, glob: str | None, config_name: str | None, split: str) -> list[Input]:
        path = Path(source)
        if source == STDLIB:
            return _stdlib()
        if path.is_file():
            return [self._file(path)]
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return [self._dataset(source, lambda: _load_saved(source, split), [os.path.abspath(source), split])]
        if path.is_dir():
            return [self._file(file) for file in self._files(path, glob)]
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not _ends(source, *_STRUCTURED, ".txt", ".gz", ".zst"):
            identity = [source, config_name, split]
            return [self._dataset(source, lambda: _load_from_hub(source, config_name, split), identity)]
        raise ConfigError(f"{source}: no such file or folder, and not the name of a Hugging Face dataset")

    def _files(self, folder: Path, glob: str | None) -> list[Path]:
        found = sorted(
            (
                path
                for path in folder.glob(glob or "**/*")
                if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
            ),
            key=lambda path: path.relative_to(folder).as_posix(),
        )
        if not found:
            raise ConfigError(f"{folder}: no files{f' that match {glob!r}' if glob else ''}")
        structured = [path for path in found if _ends(path, *_STRUCTURED)]
        if glob or not structured or len(structured) == len(found):
            return found
        self.notes.append(
            f"{folder}: reading the {len(structured)} JSON and Parquet files, leaving out "
            f"{len(found) - len(structured)} others; --glob chooses differently"
        )
        return structured

    def _file(self, path: Path) -> Input:
        structured = _ends(path, *_STRUCTURED)
        if _ends(path, ".parquet"):
            read = lambda place: _read_parquet(path, self.text_key)  # noqa: E731
        elif structured:
            read = lambda place: _read_lines(path, place)  # noqa: E731
        else:
            read = lambda place: _read_text(path)  # noqa: E731
        stat = path.stat()
        identity = [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
        whole = Input(str(path), read, stat.st_size, identity, one_document=not structured)
        if structured and not _ends(path, ".parquet", ".gz", ".zst"):
            whole.part = lambda start, stop: Input(
                f"{path} from byte {start:,}" if start else str(path),
                lambda place: _read_lines(path, place, start, stop),
                stop - start,
                identity,
            )
        return whole

    def _dataset(self, name: str, load: Callable[[], Any], identity: list[Any]) -> Input:
        return Input(name, lambda place: _read_dataset(name, load(), self.text_key, place), None, identity)


def _part(inputs: list[Input], number: int, count: int) -> list[Input]:
    """The inputs, or parts of them, that begin in the `number`-th of `count` equal stretches of all bytes; those that
    are read whole belong where their middle is."""
    for each in inputs:
        if each.size is None:
            raise ConfigError(
                f"--shard {number}/{count}: {each.name} is a Hugging Face dataset, which cannot be divided by size: "
                "give its Parquet or JSON files (`hf download` fetches them) as sources"
            )
    total = sum(each.size for each in inputs)
    low, high = total * (number - 1) // count, total * number // count
    found, begin = [], 0
    for each in inputs:
        end = begin + each.size
        start, stop = max(begin, low) - begin, min(end, high) - begin
        if each.part and start < stop:
            found.append(each.part(start, stop))
        elif not each.part and low <= (begin + end) // 2 < high:
            found.append(each)
        begin = end
    if not found:
        raise ConfigError(
            f"--shard {number}/{count}: nothing is left for this part of {len(inputs)} inputs; compressed files, "
            "Parquet and plain text are not divided: use fewer parts, or more and smaller files"
        )
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def _read_lines(path: Path, place: Place, start: int = 0, stop: int | None = None) -> Iterator[Chunk]:
    """Chunks of whole lines; of an uncompressed file, of those that begin at bytes `start` to `stop` - 1."""
    name = f"{path} from byte {start:,}" if start else str(path)
    number = place.records + 1 if place.offset else 1
    size, consumed, offset, chunk = 0, 0, place.offset or start, []
    plain = not _ends(path, ".gz", ".zst")
    # A part begins at the first line that begins in it: after the end of the line that its first byte follows.
    cut = bool(start) and not place.offset
    for line, consumed, rest in lines(blocks(path, offset - 1 if cut else offset)):
        if plain and stop is not None and offset >= stop:
            break
        if plain:
            offset = consumed - rest
        if cut:
            cut = False
            continue
        chunk.append(line)
        size += len(line)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
            yield Chunk(name, "line", number, chunk, consumed - start, offset=offset)
            number, size, chunk = number + len(chunk), 0, []
    if chunk:
        yield Chunk(name, "line", number, chunk, consumed - start, offset=offset)


def _read_text(path: Path) -> Iterator[Chunk]:
    """One document: the whole file, in parts that end with a newline where there is one.

    Newlines are tokens of their own in our tokenizers, so the parts give the tokens that the whole would give; others
    may have a token that spans the cut.
    """
    rest, split_key, pending, started = b"", None, None, False
    for block, consumed in blocks(path):
        rest += block
        if not started and (beginning := rest.lstrip()):
            started = True
            if beginning.startswith(b"{"):
                _refuse_json_lines(path)
        if len(rest) < CHUNK_BYTES:
            continue
        cut = rest.rfind(b"\n") + 1 or _character_boundary(rest)
        split_key = split_key or rest[:_HASHED_BYTES]
        if pending:
            yield pending
        pending = Chunk(str(path), "file", 1, [rest[:cut]], consumed, split_key, pending is not None, True)
        rest = rest[cut:]
    if pending and not rest:
        pending.unfinished = False
        yield pending
        return
    if pending:
        yield pending
    yield Chunk(str(path), "file", 1, [rest], path.stat().st_size, split_key, pending is not None)


def _refuse_json_lines(path: Path) -> None:
    """ConfigError if the first line with text is a JSON object."""
    line = next(line for line, *_ in lines(blocks(path)) if line.strip())
    try:
        json.loads(line)
    except ValueError:
        return
    suffix = ".jsonl" + (path.suffix if _ends(path, ".gz", ".zst") else "")
    raise ConfigError(
        f"{path}: its first line is a JSON object, and a file with this suffix would be one document of plain text: "
        f"rename it to end in {suffix}, or leave it out with --glob"
    )


def _character_boundary(data: bytes) -> int:
    """The last position that does not cut a UTF-8 character."""
    for position in range(len(data) - 1, max(len(data) - 4, 0), -1):
        if data[position] & 0xC0 != 0x80:
            return position
    return len(data)


def _read_parquet(path: Path, text_key: str) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise ConfigError(f"{path}: {no_such_key(text_key, names)}")
            size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            number = 1
            for batch in file.iter_batches(batch_size=512, columns=[text_key]):
                texts = batch.column(0).to_pylist()
                done = size * (number - 1 + len(texts)) // rows
                yield Chunk(str(path), "row", number, texts, done)
                number += len(texts)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


# -- Hugging Face datasets ---------------------------------------------------------------------------------------------


def _load_from_hub(name: str, config_name: str | None, split: str) -> Any:
    """A dataset of the hub as a stream. The datasets library (4 and later) runs no code of a dataset."""
    import datasets
    import huggingface_hub

    if not datasets.config.HF_HUB_OFFLINE:  # asked once: datasets would retry for half a minute, aloud
        try:
            there = huggingface_hub.HfApi().repo_exists(name, repo_type="dataset")
        except Exception as error:  # whatever its HTTP library raises
            raise ConfigError(
                f"{name}: no such file or folder here, and the Hugging Face hub cannot be asked for a dataset of this "
                f"name: {error}. Mend the path or the network; HF_HUB_OFFLINE=1 reads what was downloaded before"
            ) from error
        if not there:
            raise ConfigError(
                f"{name}: no such file or folder here, and the Hugging Face hub has no dataset of this name (or it is "
                "private: log in with `hf auth login`)"
            )
    try:
        return datasets.load_dataset(name, config_name, split=split, streaming=True)
    except (ValueError, RuntimeError, OSError) as error:  # DatasetNotFoundError and no network are OSErrors
        raise ConfigError(
            f"{name}: no such file or folder here, and the Hugging Face dataset cannot be read: {error}"
        ) from error


def _load_saved(path: str, split: str) -> Any:
    """A dataset that Dataset.save_to_disk or DatasetDict.save_to_disk wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot read the saved dataset: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"{path}: no split {split!r}; the splits are: {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded


def _read_dataset(name: str, dataset: Any, text_key: str, place: Place) -> Iterator[Chunk]:
    names = dataset.column_names  # None: a stream that does not know them yet
    if names is not None and text_key in names:
        dataset = dataset.select_columns([text_key])  # other columns may be costly to decode
    number = place.records + 1
    for batch in dataset.skip(place.records).iter(batch_size=512):
        if text_key not in batch:
            raise ConfigError(f"{name}: {no_such_key(text_key, batch)}")
        yield Chunk(name, "row", number, batch[text_key])
        number += len(batch[text_key])


# -- the standard library ----------------------------------------------------------------------------------------------


def _stdlib() -> list[Input]:
    """Sources of the running Python's standard library, tests left out, then docstrings of its built-in modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (
            path
            for path in root.glob("**/*.py")
            if not _STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts)
            and not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata"))
        ),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    if not files:
        raise ConfigError(f"{STDLIB}: this Python has no library sources in {root}")
    identity = [STDLIB, sys.version, str(root), len(files)]
    return [Input(STDLIB, lambda place: _read_stdlib(files), sum(path.stat().st_size for path in files), identity)]


def _read_stdlib(files: list[Path]) -> Iterator[Chunk]:
    consumed, size, texts, number = 0, 0, [], 1
    for path in files:
        with tokenize.open(path) as file:  # honours the coding line
            texts.append(file.read())
        size += len(texts[-1])
        consumed += path.stat().st_size
        if size >= CHUNK_BYTES:
            yield Chunk(STDLIB, "row", number, texts, consumed)
            number, size, texts = number + len(texts), 0, []
    texts += [_docstrings(name) for name in sorted(sys.builtin_module_names)]
    yield Chunk(STDLIB, "row", number, texts, consumed)


def _docstrings(module_name: str) -> str:
    """Documentation strings of a module without Python source, and of what it contains."""
    module = import_module(module_name)
    parts = [f"{module_name}\n\n{inspect.getdoc(module) or ''}"]
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) or inspect.isroutine(value):
            parts.append(f"{module_name}.{name}\n\n{inspect.getdoc(value) or ''}")
            members = sorted(vars(value).items()) if inspect.isclass(value) else []
            parts += [
                f"{module_name}.{name}.{key}\n\n{inspect.getdoc(member)}"
                for key, member in members
                if not key.startswith("_") and inspect.getdoc(member)
            ]
    return "\n\n".join(parts) + "\n"
