"""The sources of text: files, folders, Hugging Face datasets, the standard library. All are read as a stream.

A corpus yields chunks: a few hundred kilobytes of consecutive documents that a worker turns into tokens. Reading runs
no code from the data: datasets are Arrow, Parquet, JSON or text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many, pointer_at, refuse_pointer
from sagetrain.corpus import files
from sagetrain.corpus.archives import matches, members, names_in, wrong_glob
from sagetrain.corpus.blocks import head, on_disk
from sagetrain.corpus.chunk import Chunk, Place
from sagetrain.corpus.datasets_library import check_parts, load_from_hub, load_saved, read_dataset
from sagetrain.corpus.destination import written_among
from sagetrain.corpus.files import Wanted, contains, is_array, read
from sagetrain.corpus.kinds import MEDIA, Kind, check_head, compression, is_file_name, kind_of
from sagetrain.corpus.records import Records
from sagetrain.corpus.repeats import LONG, long_documents, refuse_copies
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.stdlib import STDLIB, measured_stdlib, read_stdlib

_HELD_OUT = re.compile(r"(^|[-_./])(test|valid|validation|dev|eval)([-_./]|$)", re.IGNORECASE)
"""Finds the names of splits that nobody trains on."""
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
"""Files beside the data of a Hugging Face dataset, which the datasets library does not read either."""
_SUFFIXES = 5
"""Number of suffixes that are named of the files of a folder that are left out."""
_LOOKED_AT = 10_000
"""Number of files whose first bytes are checked before anything is prepared. The others are checked when they are
read."""


@dataclass
class Input:
    """One file or dataset: how to read it, its size, and what identifies it at the next call."""

    name: str
    read: Callable[[Place], Iterator[Chunk]]
    """Return the chunks of the input. Chunks before the place may be left out."""
    size: int | None
    """Bytes on disk, for the progress bar. None: unknown."""
    identity: list[Any]
    texts: int = 0
    """The number of plain text files in it."""
    one_document: bool = False
    """Whether this is a plain text file that is not split."""
    part: Callable[[int, int], Input] | None = None
    """Return the lines or documents that begin at bytes start to stop - 1. None: the input is read as a whole."""
    share: Callable[[int, int], Input] | None = None
    """Return the K-th of N parts of a dataset, whose size in bytes is not known. Raises ConfigError if there are not so
    many."""


class Corpus:
    """Everything that one `prepare` reads, in order."""

    def __init__(self, texts: TextRequest, division: tuple[int, int] | None = None, records: Records | None = None):
        """Find the files, folders, archives and datasets that are asked for. Raises ConfigError if a source does not
        exist or is empty, is something else than its name says, or is plain text where fields are wanted.

        Args:
            division: (K, N): read the K-th of N parts, which are equal in bytes; of each dataset, in rows or files.
            records: read these fields of each record, by name, instead of a text.
        """
        if not texts.source_texts:
            raise ConfigError("no source of text given")
        if "" in texts.source_texts:  # Path("") is the current folder.
            raise ConfigError(
                "a source is an empty text (a variable of the shell that is not set?): name it, or . for "
                "the current folder"
            )
        self.texts, split_on = texts, texts.split_on
        self._fields, optional = (records.fields, records.optional_fields) if records else ((), ())
        separator = _separator(split_on) if split_on is not None else b""
        options = records.options if records else {}
        self._wanted = Wanted(self._fields or (texts.text_key,), optional, bool(self._fields), separator, options)
        self._refuse_copies = partial(refuse_copies, texts.text_key, bool(self._fields))
        self.notes: list[str] = []
        self.inputs: list[Input] = []
        self._looked_at = self._folders = 0
        self._paths: list[Path] = []
        self._by_inode: dict[tuple[int, int], Path] = {}
        for source in texts.source_texts:
            self.inputs += self._resolve(source)
        if self._paths:
            inputs = {each.identity[0]: each for each in self.inputs}
            self._refuse_copies(map(os.path.abspath, self._paths), lambda path: inputs[path].read(Place()))
        long = [each.name for each in self.inputs if each.one_document and (each.size or 0) > LONG]
        self.notes += long_documents(long)
        self.all_inputs = self.inputs
        if split_on is not None:
            self._check_separator(split_on, separator)
        for name, given in (("dataset_split", texts.dataset_split), ("dataset_config", texts.dataset_config)):
            if given not in ("train", None) and not any(each.share for each in self.inputs):
                raise ConfigError(
                    f"{spelled(name)} {given!r}: none of the sources is a Hugging Face dataset, which it is for; "
                    f"{spelled('glob')} chooses files of a folder"
                )
        if texts.glob is not None and not self._folders:
            raise ConfigError(
                f"{spelled('glob')} {texts.glob!r}: none of the sources is a folder or an archive, whose files "
                "it chooses"
            )
        if division:
            self.inputs = _part(self.inputs, *division)

    def chunks(self, start: Place | None = None) -> Iterator[Chunk]:
        """Yield the chunks after `start`."""
        start = start or Place()
        for number, each in enumerate(self.inputs[start.input :], start.input):
            place, done, parts = start if number == start.input else Place(number), None, 0
            for chunk in each.read(place):
                done = chunk.first - 1 if done is None else done
                known, done = place.records - done, done + len(chunk.records) - chunk.unfinished
                parts = parts + 1 if chunk.unfinished else 0
                if known >= len(chunk.records) or (known == 0 and 0 < parts <= place.parts):
                    continue
                if known > 0:
                    chunk.first, chunk.records = chunk.first + known, chunk.records[known:]
                # Other long documents may be cut elsewhere when reading begins at another byte.
                if not chunk.unfinished or chunk.unit == "file":
                    chunk.after = Place(number, done, chunk.offset, parts)
                chunk.input = each.name
                yield chunk

    @property
    def named(self) -> str:
        """The name of the first input, and how many others there are, for messages."""
        first, *others = (each.name for each in self.inputs)
        return f"{first} and {many(len(others), 'other input')}" if others else first

    @property
    def size(self) -> int | None:
        """The bytes on disk of all inputs. None if some are unknown."""
        sizes = [each.size for each in self.inputs if each.size is not None]
        return sum(sizes) if len(sizes) == len(self.inputs) else None

    def identity(self) -> str:
        """Return a hash of the names, sizes and modification times of all inputs, whatever the part."""
        return sha256(json.dumps([each.identity for each in self.all_inputs]).encode()).hexdigest()

    def sample(self, max_characters: int) -> Iterator[str]:
        """Yield texts from the beginnings of all inputs, about `max_characters` together. The choice is deterministic
        and does not depend on the part.

        Each input gives an equal share. If there are too many inputs for that, a pseudo-random choice of them gives
        more.
        """
        share = max(max_characters // len(self.all_inputs), files.CHUNK_BYTES)
        left = max_characters
        how = self.texts.text_key, self.texts.skip_bad_lines
        for each in sorted(self.all_inputs, key=lambda each: blake2b(os.fsencode(each.name)).digest()):
            found = (text for chunk in each.read(Place()) for text in chunk.texts(*how) if isinstance(text, str))
            end = left - min(share, left)
            while left > end and (text := next(found, None)) is not None:
                text = text[: left - end]
                left -= len(text)
                yield text

    def _resolve(self, source: str) -> list[Input]:
        path, glob = Path(source), self.texts.glob
        config_name, split = self.texts.dataset_config, self.texts.dataset_split
        if source == STDLIB:
            if self._fields:
                raise self._no_fields(source)
            return [Input(STDLIB, read_stdlib, *measured_stdlib())]
        self._folders += path.is_dir() or kind_of(path) is Kind.ARCHIVE
        if path.is_file():
            return [self._archive(path, glob) if kind_of(path) is Kind.ARCHIVE else self._file(path)]
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            if config_name:
                raise ConfigError(
                    f"{spelled('dataset_config')} {config_name!r}: {source} is saved, and has one alone; leave it out"
                )
            return [self._dataset(source, lambda: load_saved(source, split), [os.path.abspath(source), split])]
        if path.is_dir():
            found = self._files(path, glob)
            return [self._archive(each) if kind_of(each) is Kind.ARCHIVE else self._file(each) for each in found]
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not (is_file_name(source) or os.path.lexists(source)):
            identity = [source, config_name, split]
            return [self._dataset(source, lambda: load_from_hub(source, config_name, split), identity)]
        raise ConfigError(f"{source}: {_not_found(source)}")

    def _check_separator(self, given: str, separator: bytes) -> None:
        """Check that there is plain text with the separator in it. Archives are not searched. Raises ConfigError if
        there is none."""
        texts = [each for each in self.inputs if each.texts]
        if not texts:
            raise ConfigError(f"{spelled('split_on')} {given!r}: none of the sources is plain text, which it is for")
        files = [Path(each.name) for each in texts]
        packed = any(kind_of(path) is Kind.ARCHIVE for path in files)
        if packed or any(contains(on_disk(path), separator) for path in files):
            return
        where = "it" if len(files) == 1 else f"it, nor in the other {len(files) - 1} of plain text"
        fix = "give what stands between its documents"
        windows = re.sub(rb"\r?\n", b"\r\n", separator)
        if windows != separator and any(contains(on_disk(path), windows) for path in files):
            escaped = windows.decode().replace("\r", "\\r").replace("\n", "\\n")
            fix = f"lines end as on Windows there: give '{escaped}'"
        raise ConfigError(f"{files[0]}: {spelled('split_on')} {given!r} is nowhere in {where}; {fix}")

    def _no_fields(self, source: object) -> ConfigError:
        return ConfigError(
            f"{source}: plain text has no fields ({', '.join(self._fields)}): give .jsonl, .csv or .parquet files, or "
            "a Hugging Face dataset"
        )

    def _files(self, folder: Path, glob: str | None) -> list[Path]:
        try:
            there = [*folder.glob(glob or "**/*")]
        except (ValueError, NotImplementedError) as error:
            raise wrong_glob(str(glob), error) from error
        hidden = {path for path in there if any(part.startswith(".") for part in path.relative_to(folder).parts)}
        there = [path for path in there if path not in hidden]
        files = {path for path in there if path.is_file()}
        others = [path for path in there if path not in files]
        found = sorted(files, key=lambda path: path.relative_to(folder).as_posix())
        if not glob and (written := written_among(files)):
            stems = sorted(str(path.with_suffix("")) for path in written if path.suffix == ".idx")
            found = [path for path in found if path not in written]
            what = f"{', '.join(stems[:3])}{' ...' if stems[3:] else ''}"
            if not found:
                raise ConfigError(
                    f"{folder} holds what `sagetrain prepare` has written: name a token file, without suffix, in "
                    f"data.train[].path or in eval --data ({what})"
                )
            self.notes.append(f"{folder}: passing over what `sagetrain prepare` has written there ({what})")
        if not found:
            passed = next((f" (hidden ones are passed over: {path})" for path in hidden if path.is_file()), "")
            what = f" that match {glob!r}" if glob else ""
            raise ConfigError(f"{folder}: no files{what}{passed}{_links(folder, others)}")
        if links := _links(folder, others):
            self.notes.append(f"{folder}{links}")
        if odd := [path for path in others if path.exists() and not path.is_dir()]:
            self.notes.append(f"{odd[0]} is neither a file nor a folder, and is passed over (one of {len(odd)})")
        if glob:
            return found
        chosen = self._chosen(folder, {str(path): path.stat().st_size for path in found})
        names = [path.relative_to(folder).as_posix() for path in found if str(path) in chosen]
        held_out = [name for name in names if _HELD_OUT.search(name)]
        if held_out and any("train" in name.lower() for name in names):
            self.notes.append(
                f"{folder}: {held_out[0]} and what else is called test or validation ({len(held_out)} of {len(names)} "
                f"files) is read with the rest; {spelled('glob')} leaves it out, as in {spelled('glob')} '**/*train*'"
            )
        return [folder / name for name in names]

    def _chosen(self, where: Path, sizes: dict[str, int]) -> set[str]:
        """Choose the files of a folder or archive that are read: JSON and Parquet, tables and archives, or plain text,
        whichever are the most bytes. Records are never plain text. `notes` gets a sentence about what is left out."""
        kinds = {name: kind_of(name) for name in sizes}
        structured = {name for name, kind in kinds.items() if kind in (Kind.LINES, Kind.JSON, Kind.PARQUET)}
        structured = {name for name in structured if PurePath(name).name not in _METADATA} or structured
        texts = {name for name, kind in kinds.items() if kind is Kind.TEXT}
        tables = {name for name, kind in kinds.items() if kind in (Kind.TABLE, Kind.ARCHIVE)}
        texts = {name for name in texts if PurePath(name).suffix.lower() not in MEDIA} or texts
        groups = {"JSON and Parquet": structured, "table and archive": tables, "plain text": texts}
        if self._fields and (structured or tables):
            del groups["plain text"]
        what, chosen = max(groups.items(), key=lambda group: (sum(sizes[name] for name in group[1]), bool(group[1])))
        if len(chosen) < len(sizes):
            left = sizes.keys() - chosen
            suffixes = ", ".join(sorted({PurePath(name).suffix.lower() for name in left} - {""})[:_SUFFIXES])
            self.notes.append(
                f"{where}: reading the {many(len(chosen), f'{what} file')}, leaving out {many(len(left), 'other')}"
                f"{f' ({suffixes})' * bool(suffixes)}; {spelled('glob')} chooses differently"
            )
        return chosen

    def _once(self, path: Path) -> os.stat_result:
        """Return the status of a file. Raises ConfigError if it is read already under another name."""
        self._paths.append(path)
        stat = path.stat()
        other = self._by_inode.setdefault((stat.st_dev, stat.st_ino), path) if stat.st_ino and stat.st_size else path
        if os.path.abspath(other) != os.path.abspath(path):
            raise ConfigError(
                f"{other} and {path} are one file, by a link: its texts would be there twice; choose one with "
                f"{spelled('glob')}, or take the other away"
            )
        return stat

    def _file(self, path: Path) -> Input:
        stat = self._once(path)
        kind, wanted, content = kind_of(path), self._wanted, on_disk(path)
        if wanted.fields and kind is Kind.TEXT:
            raise self._no_fields(path)
        if kind is Kind.PARQUET and (packed := compression(path)):
            raise ConfigError(f"{path}: Parquet is not read out of {packed}; unpack it (it is compressed by itself)")
        begin = b""
        if self._looked_at < _LOOKED_AT:
            self._looked_at += 1
            begin = head(content)
            check_head(str(path), begin)
        identity = [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
        if kind is Kind.PARQUET:
            from sagetrain.corpus.arrow_tables import read_parquet  # This import loads pyarrow.

            return Input(str(path), lambda place: read_parquet(path, wanted), stat.st_size, identity)
        text = kind is Kind.TEXT
        one_document = text and not wanted.separator
        whole = Input(str(path), lambda place: read(content, wanted, place), stat.st_size, identity, text, one_document)
        divisible = (
            wanted.divisible if text else kind in (Kind.LINES, Kind.JSON) and not is_array(begin or head(content))
        )
        if divisible and content.seekable:
            whole.part = lambda start, stop: Input(
                f"{path} from byte {start:,}" if start else str(path),
                lambda place: read(content, wanted, place, start, stop),
                stop - start,
                identity,
            )
        return whole

    def _archive(self, path: Path, glob: str | None = None) -> Input:
        stat = self._once(path)
        sizes = names_in(path)
        if glob:
            sizes = {name: size for name, size in sizes.items() if matches(name, glob)}
        if not sizes:
            raise ConfigError(f"{path}: no files in it{f' that match {glob!r}' if glob else ''}")
        chosen = {*sizes} if glob else self._chosen(path, sizes)

        def chunks(names: set[str]) -> Iterator[Chunk]:
            return chain.from_iterable(read(each, self._wanted, Place()) for each in members(path, names))

        self._refuse_copies(sorted(chosen), lambda name: chunks({name}), f"{path}: ")
        kinds = {name: kind_of(name) for name in chosen}
        for name, kind in kinds.items():
            if kind in (Kind.ARCHIVE, Kind.PARQUET):
                raise ConfigError(f"{path}: {name} is {kind.value}, which is not read out of an archive: unpack it")
            if kind is Kind.TEXT and self._wanted.fields:
                raise self._no_fields(f"{path}/{name}")
        texts = sum(kind is Kind.TEXT for kind in kinds.values())
        one_document = len(chosen) == texts == 1 and not self._wanted.separator

        names = sha256(os.fsencode("\n".join(sorted(chosen)))).hexdigest()
        identity = [os.path.abspath(path), stat.st_size, stat.st_mtime_ns, names]
        return Input(str(path), lambda place: chunks(chosen), stat.st_size, identity, texts, one_document)

    def _dataset(self, name: str, load: Callable[[], Any], identity: list[Any]) -> Input:
        wanted = self._wanted

        def share(number: int, count: int) -> Input:
            check_parts(name, load(), number, count)
            part = f"{name} (part {number} of {count})"
            read = lambda place: read_dataset(part, load().shard(count, number - 1), place, wanted)  # noqa: E731
            return Input(part, read, None, identity)

        return Input(name, lambda place: read_dataset(name, load(), place, wanted), None, identity, share=share)


def _links(folder: Path, others: list[Path]) -> str:
    """Name the links among what is no file in a folder."""
    links = sorted(str(path.relative_to(folder)) for path in others if path.is_symlink())
    if not links:
        return ""
    more = f" and {many(len(links) - 1, 'other')} are" if links[1:] else " is"
    if said := next(filter(None, (pointer_at(folder / link) for link in links)), ""):
        return f": the link {links[0]}{more} not followed: {said}"
    return (
        f": the link {links[0]}{more} not followed, which is done to files alone: name the folder that it leads to as "
        "a source, too, or mend it if it leads nowhere"
    )


def _not_found(source: str) -> str:
    if "://" in source:
        return (
            "is an address, and files are read from this machine alone; download it first (curl -LO, hf download, "
            "aws s3 cp, gcloud storage cp), or give the name of a Hugging Face dataset"
        )
    if Path(source).exists():
        return "is neither a file nor a folder; write its content to a file"
    if Path(source).is_symlink():
        refuse_pointer(source)
        return f"is a link to {Path(source).readlink()}, which leads to nothing; mend the link, or name the file itself"
    what = "no such file or folder, and not the name of a Hugging Face dataset"
    if re.search(r"[*?\[]", source):
        return (
            f"{what}; a pattern is expanded by the shell, without quotation marks, or give its folder and "
            f"{spelled('glob')}"
        )
    return what


def _separator(text: str) -> bytes:
    """Return the bytes of --split-on, in which \\n, \\r, \\t, \\f and \\xHH stand for characters that cannot be
    typed."""
    if not text:
        raise ConfigError(
            f"{spelled('split_on')} is empty: give what stands between documents, such as '<|endoftext|>'"
        )
    meant = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}
    code = r"\\(?:([nrtf\\])|x([0-7][0-9a-fA-F]))"
    return re.sub(code, lambda found: meant[found[1]] if found[1] else chr(int(found[2], 16)), text).encode()


def _part(inputs: list[Input], number: int, count: int) -> list[Input]:
    """Return the inputs, or parts of them, that begin in the `number`-th of `count` equal stretches of all bytes. An
    input that is read as a whole belongs to the stretch that its middle is in. Of every dataset, return its `number`-th
    part."""
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
            f"{spelled('shard')} {number}/{count}: nothing is left for this part of {len(inputs)} inputs; compressed "
            "files, archives, tables, arrays, Parquet and plain text are not divided (but text by "
            f"{spelled('split_on')} is): use fewer parts, or more and smaller files"
        )
    return found
