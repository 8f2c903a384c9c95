"""Counts of what went into token files and of what was left out, and the messages about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many, some
from sagetrain.corpus.notes import FORGED, UNKNOWN, WRITTEN, Notes
from sagetrain.corpus.records import Records


@dataclass
class Counts:
    """The counts of one token file."""

    documents: int = 0
    """Documents that were written."""
    tokens: int = 0
    """Tokens that were written, with those that end documents."""
    bytes: int = 0
    """UTF-8 bytes of text."""
    empty_documents: int = 0
    """Documents that were left out because they had no text, or only white space. Not part of `documents`."""
    bad_lines: int = 0
    """Lines that were left out with skip_bad_lines."""
    counted_tokens: int = 0
    """For records: tokens that count in the loss."""
    padding_tokens: int = 0
    """For records: padding tokens between records."""
    cut_records: int = 0
    """Records that were longer than a sequence, and were cut at its end."""
    too_long_records: int = 0
    """Records that were left out because their completion begins after the end of a sequence. Not part of
    `documents`."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Counts:
        """Read the counts from the provenance record of a token file."""
        return cls(**{key: record.get(key, nothing) for key, nothing in asdict(cls()).items()})


@dataclass
class Tally:
    """The counts of a chunk or of all of a call, with notes about its records and texts."""

    counts: dict[str, Counts]
    """The counts of each token file, by "train" and "valid". What is left out counts in "train"."""
    first_bad: str | None = None
    """The mistake in the first bad line, and its place."""
    notes: Notes = field(default_factory=Notes)

    @property
    def tokens(self) -> int:
        """The number of tokens in all files."""
        return sum(each.tokens for each in self.counts.values())

    def add(self, other: Tally) -> None:
        """Add the counts of a chunk."""
        for side, own in self.counts.items():
            both = zip(astuple(own), astuple(other.counts[side]), strict=True)
            self.counts[side] = Counts(*map(sum, both))
        self.first_bad = self.first_bad or other.first_bad
        self.notes += other.notes

    def leave_out(self, bad: ConfigError) -> None:
        """Count a bad line, and keep the mistake of the first one."""
        self.counts["train"].bad_lines += 1
        self.first_bad = self.first_bad or str(bad)

    def sentences(
        self, outputs: Mapping[str, Path], records: Records | None, prefix: Sequence[int] = ()
    ) -> Iterator[str]:
        """Yield sentences about what was written and what was left out. `prefix` are tokens before each document."""
        if prefix:
            what = f"{'record' if records else 'document'} begins with token{'s' * (len(prefix) > 1)}"
            yield f"each {what} {', '.join(map(str, prefix))}, which the tokenizer puts before a text"
        for side, path in outputs.items():
            found = self.counts[side]
            yield f"{path}: {found.tokens:,} tokens, {many(found.documents, 'document')}"
            if records:
                share, padding = (each / found.tokens for each in (found.counted_tokens, found.padding_tokens))
                yield f"{path}: {share:.1%} of the tokens count in the loss, {padding:.1%} are padding between records"
        train = self.counts["train"]
        if records and train.cut_records:
            yield (
                f"cut {many(train.cut_records, 'record')} after {records.seq_length:,} tokens ({spelled('seq_length')})"
            )
        if records and train.too_long_records:
            yield f"left out {self._too_long(records)}"
        if train.empty_documents:
            yield f"left out {many(train.empty_documents, 'empty document')}"
        if self.first_bad:
            yield f"left out {self._bad_lines()}"
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        """Yield a line for each note about records. It lists the keys that the note is about, the most frequent
        first."""
        about: dict[str, list[str]] = {}
        for (sentence, key), count in sorted(self.notes.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            what = "time" if sentence in (WRITTEN, UNKNOWN, FORGED) else "record"
            about.setdefault(sentence, []).append(f"{key} ({many(count, what)})".lstrip())
        for sentence, keys in about.items():
            yield f"{sentence} {some(keys, 12)}"

    def why_nothing(self, side: str, records: Records | None, valid_fraction: float) -> str:
        """Return the reason why a file may have got no document, for a message. Return "" where no reason is known."""
        why = f" ({self._bad_lines()})" if self.first_bad else ""
        if records and self.counts["train"].too_long_records:
            why += f" ({self._too_long(records)})"
        if side == "valid":
            documents = many(self.counts["train"].documents, "document")
            why += f": {spelled('valid_fraction')} {valid_fraction:g} of {documents} took none, use a larger one"
        return why

    def _bad_lines(self) -> str:
        return f"{many(self.counts['train'].bad_lines, 'bad line')}, the first: {self.first_bad}"

    def _too_long(self, records: Records) -> str:
        left_out = many(self.counts["train"].too_long_records, "record")
        return (
            f"{left_out} in which nothing of the first {records.seq_length:,} tokens ({spelled('seq_length')}) counts"
        )
