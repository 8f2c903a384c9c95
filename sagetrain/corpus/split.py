"""Check the split of documents into a train and a valid file before all are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil, floor

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many
from sagetrain.corpus.chunk import HASHED_BYTES, Chunk, Place, place_of
from sagetrain.corpus.sources import Corpus

_LOOKED_AT = 1000
"""Number of chunks in which documents of both sides are looked for. They are half a gigabyte at most."""


def check_split(corpus: Corpus, valid_fraction: float) -> None:
    """Check that both sides of the split of texts get a document, as far as the first chunks show it. Raises
    ConfigError if a side gets none."""
    if not valid_fraction:
        return
    asked = f"{spelled('valid_fraction')} {valid_fraction:g}"
    if len(corpus.inputs) == 1 and corpus.inputs[0].one_document:
        raise ConfigError(
            f"{corpus.named}: {asked} needs several documents, and a plain text file is one document: say what stands "
            f"between documents ({spelled('split_on')}), or write it as .jsonl, where each line is a document "
            f'({{"text": "..."}}), or leave out {spelled("valid_fraction")}'
        )
    places: list[int] = []
    for number, chunk in enumerate(_beginnings(corpus)):
        if number == _LOOKED_AT:
            return
        texts = [text for text in chunk.texts(corpus.texts.text_key, True) if isinstance(text, str)]
        texts = texts[chunk.continues :]  # The first one began in the chunk before.
        places += [place_of(chunk.split_key or text.encode()[:HASHED_BYTES]) for text in texts]
        if places and min(places) < valid_fraction * 2**64 <= max(places):
            return
    if len(set(places)) < 2:  # The documents are empty or alike, which is said when all are read.
        return
    low, high = min(places), max(places)
    if low >= valid_fraction * 2**64:
        rounded = (ceil(low / 2**64 * 10**digits) / 10**digits for digits in range(2, 18))
        wrong, fix = "took none", "use {} or more"
    else:
        rounded = (floor(high / 2**64 * 10**digits) / 10**digits for digits in range(2, 18))
        wrong, fix = "took all", "use {} or less"
    works = next(share for share in rounded if low < share * 2**64 <= high)
    raise ConfigError(f"{corpus.named}: {asked} of {many(len(places), 'document')} {wrong}: {fix.format(works)}")


def _beginnings(corpus: Corpus) -> Iterator[Chunk]:
    """Yield the chunks of all inputs, of an input that is one document the first chunk alone."""
    for each in corpus.inputs:
        yield from islice(each.read(Place()), 1 if each.one_document else None)
