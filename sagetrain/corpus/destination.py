"""The files that `sagetrain prepare` writes, and the checks of what stands there already.

A token file belongs to the tokenizer in its folder. A held-out file belongs to the text that it was kept out of. The
parts of a text belong to each other. Nothing is written that would part them, and nothing of another request is
replaced unless the user asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import differences
from sagetrain.config.schema import TOKENIZER_JSON, TOKENIZER_NAME, tokenizer_in
from sagetrain.corpus.journal import Journal, in_words, of_one_whole, recorded_tokenizers
from sagetrain.corpus.request import Request
from sagetrain.data.token_file import TokenFile, check_writable, read_provenance, token_path
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_config import BESIDE, CONFIG


class Destination:
    """The token files that a request makes, and the tokenizer in their folder."""

    def __init__(self, request: Request) -> None:
        """Raise ConfigError if nothing can be written there, or a file of something else would be replaced."""
        self._request, self.division = request, request.division
        self.named = Path(request.output)
        """The path of the token file as the user named it, without suffix."""
        check_writable(self.named)
        for path in self.outputs.values():
            foreign = [token_path(path, suffix) for suffix in (".bin", ".mask", ".json")]
            if token_path(path, ".idx").exists() or Journal(self.train).exists or _is_record(foreign[-1]):
                continue
            for file in foreign:
                if os.path.lexists(file):
                    raise ConfigError(
                        f"{file} is no part of a token file, which has an .idx, and would be replaced: choose "
                        "another output (-o), or move the file away"
                    )

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self.named.parent

    @cached_property
    def train(self) -> Path:
        """The path of the token file."""
        return self._part(self.named)

    @cached_property
    def valid(self) -> Path:
        """The path of the held-out token file, or where it would be."""
        return self._part(self.named.with_name("valid"))

    @cached_property
    def outputs(self) -> dict[str, Path]:
        """The paths of the token files that are written, by "train" and, if it is written, "valid"."""
        return {"train": self.train} | ({"valid": self.valid} if self._request.valid_fraction else {})

    def holds(self, request: dict[str, Any], tokenizer: str) -> bool:
        """Whether all files exist and come from this request, with a tokenizer file of this name. Raises ConfigError if
        files of another request are in the way, or a file is damaged."""
        existing = [path for path in self.outputs.values() if token_path(path, ".idx").exists()]
        for path in existing:
            if read_provenance(path).get("request") != request:
                raise ConfigError(
                    f"token file {path} exists and was prepared from other inputs or settings: "
                    f"choose another output (-o), delete it, or replace it with {spelled('overwrite')}"
                )
            try:
                TokenFile(path)
            except ConfigError as error:
                raise ConfigError(f"{error}; {spelled('overwrite')} does that in its place") from error
        return len(existing) == len(self.outputs) and (self.folder / tokenizer).is_file()

    def check(self, made_from: dict[str, Any], given: Tokenizer | None) -> list[str]:
        """Check that nothing of another request is parted or replaced. Raises ConfigError if something would be.
        Returns notes about parts that may belong together.

        Args:
            given: the tokenizer, unless a new one is trained.
            made_from: what decides the content of the files, as their record has it.
        """
        self._check_beside(given)
        if not self._request.overwrite:
            self._check_tokenizer(made_from)
        notes = self.check_parts(made_from)
        self._check_held_out(made_from)
        return notes

    def sentences(self) -> Iterator[str]:
        """Yield how a run reads the parts of a text, if this is one."""
        if self.division:
            number, count = self.division
            yield f"part {number} of {count}; train on all of them by data.train path: {self.named}-*"

    def _check_beside(self, given: Tokenizer | None) -> None:
        """Check that no file in the folder would change what the tokenizer means there. Raises ConfigError if one
        would."""
        named = self._request.tokenizer or (None if self._request.vocab_size else tokenizer_in(self.folder))
        if named and Path(named).resolve().parent == self.folder.resolve():
            return
        config = self.folder / CONFIG
        written = given is not None and config.is_file() and config.read_bytes() == given.files.get(CONFIG)
        ours = {CONFIG} if written or tokenizer_in(self.folder).is_file() else set()
        if found := [name for name in BESIDE if name not in ours and (self.folder / name).exists()]:
            raise ConfigError(
                f"{self.folder} holds {found[0]}, which is of another tokenizer and would change this one: choose "
                "another folder (-o)"
            )

    def _check_tokenizer(self, request: dict[str, Any]) -> None:
        """Check that the folder's tokenizer would not be replaced by another one, because checkpoints need it. Raises
        ConfigError if it would be."""
        there, theirs = tokenizer_in(self.folder), ""
        if not there.is_file():
            return
        with suppress(ConfigError):
            theirs = Tokenizer.load(there).sha256
        # An interrupted call with this request may have left the tokenizer that it trained, and one of two token files.
        # Or another host finishes its part: its journal disappears when its token files are there, so the journal is
        # read first.
        unfinished = recorded_tokenizers(self.folder, request)
        paths = {path.with_suffix("") for path in self.folder.glob("*-of-*.idx")} | set(self.outputs.values())
        records = [read_provenance(path) for path in paths]
        known = [each["tokenizer_sha256"] for each in records if of_one_whole(each.get("request", {}), request)]
        if theirs not in [request["tokenizer"], *unfinished, *known]:
            raise ConfigError(
                f"{there} exists and would be replaced by another tokenizer; models trained with it could not be used "
                f"any more. Write to another folder (-o), keep it with {spelled('tokenizer')} {there} and no "
                f"{spelled('vocab_size')}, or replace it with {spelled('overwrite')}"
            )

    def check_siblings(self, tokenizer: Tokenizer) -> None:
        """Check that no other token files in the folder belong to another tokenizer, which they would lose. Raises
        ConfigError if some do."""
        for idx in sorted(self.folder.glob("*.idx")):
            path = idx.with_name(idx.name.removesuffix(".idx"))
            theirs = read_provenance(path).get("tokenizer_sha256")
            if path not in self.outputs.values() and theirs not in (None, tokenizer.sha256):
                raise ConfigError(
                    f"{self.folder} holds {path.name}, prepared with another tokenizer: choose another folder (-o)"
                )

    def _check_held_out(self, request: dict[str, Any]) -> None:
        """Check that a held-out file that is not written anew holds no documents that would now be in both files.
        Raises ConfigError if it does."""
        idx = token_path(self.valid, ".idx")
        if self._request.valid_fraction or self.train == self.valid or not idx.exists():
            return
        record = read_provenance(self.valid)
        theirs = record.get("request", {})
        # The train file of the same split is replaced, from a source that has changed since. Most documents are the
        # same.
        same_split = read_provenance(self.train).get("request") == theirs and not {
            *self._request.source_texts
        }.isdisjoint(record.get("sources", ()))
        if theirs.get("inputs_sha256") == request["inputs_sha256"] or same_split:
            raise ConfigError(
                f"{idx} was prepared from the same inputs, and its documents would now be in {self.train} too: a "
                f"validation loss on it would mean nothing. Give {spelled('valid_fraction')} (it was "
                f"{theirs['valid_fraction']}) "
                f"and {spelled('overwrite')} to write both again, or delete {self.valid}.bin, .idx and .json"
            )

    def check_parts(self, made_from: dict[str, Any]) -> list[str]:
        """Check that NAME-* will not hold parts of different preparations, in which some documents are twice and others
        missing. Raises ConfigError if it would. Returns notes about parts that may belong together."""
        if not self.division or self._request.overwrite:
            return []
        notes = []
        part = re.compile(re.escape(self.named.name) + r"-\d{5}-of-(\d{5})")
        for path in sorted(file.with_suffix("") for file in self.folder.glob(f"{self.named.name}-*.json")):
            if path == self.train or not (found := part.fullmatch(path.name)):
                continue
            if not (theirs := read_provenance(path).get("request")):
                continue  # This file comes from elsewhere.
            # Tokenizers are compared by their hash (check_siblings), because the first part may have trained it.
            free = "shard", "tokenizer", "skip_bad_lines"
            differ = [key for key in differences(theirs, made_from) if key not in free]
            count = self.division[1]
            if (parts := int(found[1])) != count or [key for key in differ if key != "inputs_sha256"]:
                what = in_words(differ) if parts == count else f"{parts} parts instead of {count}"
                raise ConfigError(
                    f"{path}.json is of another preparation ({what}), and {self.named}-* would read both: choose "
                    "another output (-o), delete the token files of the other one, or replace it part by part with "
                    f"{spelled('overwrite')}"
                )
            if differ:  # Copies on several hosts have modification times of their own.
                notes.append(
                    f"{path.name} was made from inputs of other names, sizes or times; are they the same text?"
                )
        return notes

    def _part(self, path: Path) -> Path:
        return path.with_name("{}-{:05}-of-{:05}".format(path.name, *self.division)) if self.division else path


def _is_record(file: Path) -> bool:
    """Return whether a file is the record of a token file. A call that was interrupted at its end may have left one.

    The file is searched where it lies, because texts may be larger than memory. In their JSON such a key would have
    backslashes."""
    try:
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(b'"tokenizer_sha256": ') >= 0
    except (OSError, ValueError):  # There is none, or an empty one.
        return False


def written_among(files: set[Path]) -> set[Path]:
    """Return those of some files that `prepare` has written: token files, unfinished ones, and their tokenizers."""
    stems = {path.with_suffix("") for path in files if path.suffix == ".idx" and path.with_suffix(".bin") in files}
    stems |= {path.with_suffix("").with_suffix("") for path in files if path.name.endswith(".idx.partial")}
    folders = {stem.parent for stem in stems}
    tokenizers = {folder / name for folder in folders for name in (TOKENIZER_NAME, TOKENIZER_JSON, *BESIDE)}
    endings = (".bin", ".idx", ".mask", ".json", ".tokenizer")
    names = {Path(f"{stem}{ending}{last}") for stem in stems for ending in endings for last in ("", ".partial")}
    return files & (names | tokenizers)
