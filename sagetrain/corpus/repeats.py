"""Texts that would be read twice, and plain text that becomes one long document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many
from sagetrain.corpus.chunk import Chunk
from sagetrain.corpus.kinds import alike

LONG = 10**6
"""Bytes of plain text beyond which it is said that they become one document."""
_BEGINNING = 1 << 16
"""Characters of a text that are compared."""
_COMPARED, _SEARCHED = 16, 10_000
"""The first texts of a file that are looked for, and the number of texts among which they are."""


def refuse_copies(
    text_key: str,
    of_fields: bool,
    names: Iterable[str],
    read: Callable[[str], Iterator[Chunk]],
    where: str = "",
) -> None:
    """Check that no file is named twice, and that no two files whose names are alike begin with the same texts. Raises
    ConfigError if the texts of a file would be there twice.

    Args:
        of_fields: whether the fields of records are wanted, and not one text.
        read: returns the chunks of a file.
        where: the archive that the files are in, for messages.
    """
    for one, other in alike(names):
        if one == other:
            raise ConfigError(f"{where}{one} is named twice: its texts would be there twice; name it once")
        first = {*islice(_beginnings(read(other), text_key, of_fields), _COMPARED)}
        if first and first <= {*islice(_beginnings(read(one), text_key, of_fields), _SEARCHED)}:
            raise ConfigError(
                f"{where}{one} and {where}{other} begin with the same texts, which would be there twice: choose one "
                f"with {spelled('glob')}, or take the other away"
            )


def _beginnings(chunks: Iterator[Chunk], text_key: str, of_fields: bool) -> Iterator[bytes]:
    """Yield a hash of the beginning of each text, or of the wanted fields of each record. What cannot be read is left
    out here."""
    as_text = partial(json.dumps, default=str, sort_keys=True)
    for chunk in chunks:
        for text in chunk.values(as_text, True) if of_fields else chunk.texts(text_key, True):
            if isinstance(text, str):
                yield blake2b(text[:_BEGINNING].encode(errors="replace")).digest()


def long_documents(names: list[str]) -> list[str]:
    """Return the note about long files of plain text that are not split, of which each becomes one document."""
    if not names:
        return []
    more = f" and {many(len(names) - 1, 'other file')}" if names[1:] else ""
    return [
        f"{names[0]}{more}: plain text of more than {LONG // 10**6} MB that becomes one document; "
        f"{spelled('split_on')} says what "
        f"stands between documents, as in {spelled('split_on')} '\\n\\n'"
    ]
