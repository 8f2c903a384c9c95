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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.data.blocks import blocks, lines
from sagetrain.data.blocks import ends as _ends
from sagetrain.data.chunk import Chunk, Place, no_such_key

STDLIB = "python-stdlib"
CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 4096
_HASHED_BYTES = 1 << 16
_STRUCTURED = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl.zst", ".ndjson.zst",
               ".json.zst", ".parquet")  # fmt: skip
_STDLIB_LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests",
                    "turtledemo"}  # fmt: skip


def _check_columns(origin: object, columns: Iterable[str], names: Iterable[str], fields: bool) -> None:
    option = "--prompt-field, --completion-field or --chat-field" if fields else "--text-key"
    for column in columns:
        if column not in names:
            raise ConfigError(f"{origin}: {no_such_key(column, names, option)}")


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
    share: Callable[[int, int], Input] | None = None
    """The K-th of N parts of a dataset, whose bytes are not known. ConfigError if there are not so many."""


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
        fields: tuple[str, ...] = (),
        optional_fields: tuple[str, ...] = (),
    ):
        """Resolve `sources`: files, folders (recursive, `glob` chooses), dataset names, or "python-stdlib".

        `config_name` and `split` are for Hugging Face datasets; `skip_bad_lines` is for `sample`. With `shard` (K, N)
        the inputs are the K-th of N parts, alike in bytes; of each dataset, in rows or files. With `fields` rows hold
        these, by name, instead of a text, and those of `optional_fields` that there are. ConfigError if a source does
        not exist or is empty, or is plain text where fields are wanted.
        """
        if not sources:
            raise ConfigError("no source of text given")
        self.text_key, self._skip_bad, self._fields = text_key, skip_bad_lines, fields
        self._columns, self._optional = fields or (text_key,), optional_fields
        self.notes: list[str] = []
        self.inputs: list[Input] = []
        for source in sources:
            self.inputs += self._resolve(source, glob, config_name, split)
        self.all_inputs = self.inputs
        if shard:
            self.inputs = _part(self.inputs, *shard)

    def chunks(self, start: Place | None = None) -> Iterator[Chunk]:
        """What comes after `start`."""
        start = start or Place()
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
        sizes = [each.size for each in self.inputs if each.size is not None]
        return sum(sizes) if len(sizes) == len(self.inputs) else None

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
            if self._fields:
                raise self._no_fields(source)
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

    def _no_fields(self, source: object) -> ConfigError:
        return ConfigError(
            f"{source}: plain text has no fields ({', '.join(self._fields)}): give .jsonl or .parquet files, or a "
            "Hugging Face dataset"
        )

    def _files(self, folder: Path, glob: str | None) -> list[Path]:
        try:
            there = [*folder.glob(glob or "**/*")]
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"--glob {glob!r}: {error}; write it relative to the folder, ** alone between slashes: '**/*.md'"
            ) from error
        found = sorted(
            (
                path
                for path in there
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
        if self._fields and not structured:
            raise self._no_fields(path)
        if _ends(path, ".parquet"):
            read = lambda place: _read_parquet(path, self._columns, self._optional, bool(self._fields))  # noqa: E731
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
        columns = self._columns, self._optional, bool(self._fields)

        def share(number: int, count: int) -> Input:
            _check_parts(name, load(), number, count)
            part = f"{name} (part {number} of {count})"
            read = lambda place: _read_dataset(part, load().shard(count, number - 1), place, *columns)  # noqa: E731
            return Input(part, read, None, identity)

        return Input(name, lambda place: _read_dataset(name, load(), place, *columns), None, identity, share=share)


def _part(inputs: list[Input], number: int, count: int) -> list[Input]:
    """The inputs, or parts of them, that begin in the `number`-th of `count` equal stretches of all bytes; those that
    are read whole belong where their middle is. Of every dataset that part of it."""
    total = sum(each.size or 0 for each in inputs)
    low, high = total * (number - 1) // count, total * number // count
    found, begin = [], 0
    for each in inputs:
        end = begin + (each.size or 0)
        start, stop = max(begin, low) - begin, min(end, high) - begin
        if each.share:
            found.append(each.share(number, count))
        elif each.part and start < stop:
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


def _read_parquet(path: Path, columns: Sequence[str], optional: Sequence[str], fields: bool) -> Iterator[Chunk]:
    """Rows are the texts of one column, or with `fields` dicts of these columns, and of optional ones."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(path, columns, names, fields)
            read = [name for name in (*columns, *optional) if name in names]
            size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            number = 1
            for batch in file.iter_batches(batch_size=512, columns=read):
                done = size * (number - 1 + len(batch)) // rows
                yield _rows(str(path), batch, number, read, fields, names, done)
                number += len(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _rows(
    origin: str, table: Any, number: int, columns: Sequence[str], fields: bool, names: Sequence[str], consumed: int = 0
) -> Chunk:
    """A chunk of a table's rows, from row `number` on; names: of all columns of the whole table."""
    from sagetrain.data.tables import records_in, values_in

    try:
        records = records_in(table, columns) if fields else values_in(table, columns[0])
    except ValueError as error:
        last = number + len(table) - 1
        raise ConfigError(
            f"{origin}, rows {number:,} to {last:,}: a column of JSON holds what is none: {error}"
        ) from error
    unread = tuple(name for name in names if name not in columns)
    return Chunk(origin, "row", number, records, consumed, unread=unread)


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


def _check_parts(name: str, dataset: Any, number: int, count: int) -> None:
    """ConfigError if the dataset cannot be divided into so many parts."""
    import datasets

    if isinstance(dataset, datasets.Dataset):
        there, why, otherwise = dataset.num_rows, f"{name} has {dataset.num_rows} rows", ""
    else:
        there, otherwise = dataset.num_shards, ", or give its files as sources (`hf download` fetches them)"
        why = f"{name} is a stream of {there} file{'s' * (there != 1)}, and a file is read whole"
    if there < count:
        raise ConfigError(f"--shard {number}/{count}: {why}: use at most {there} part{'s' * (there != 1)}{otherwise}")


def _read_dataset(
    name: str, dataset: Any, place: Place, columns: Sequence[str], optional: Sequence[str], fields: bool
) -> Iterator[Chunk]:
    """As _read_parquet."""
    names = dataset.column_names  # None: a stream that does not know them yet
    read = [*columns, *(each for each in optional if each in (names or ()))]
    if names is not None and set(read) <= set(names):
        dataset = dataset.select_columns(read)  # other columns may be costly to decode
    number = place.records + 1
    for table in dataset.with_format("arrow").skip(place.records).iter(batch_size=512):
        there = names or table.schema.names
        _check_columns(name, columns, there, fields)
        yield _rows(name, table, number, [*columns, *optional] if names is None else read, fields, there)
        number += len(table)


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
