"""Encode long texts piece by piece, because a tokenizer needs 30 to 120 times the bytes that it encodes in one call.

A text is cut only where the cut changes no token: the tokens around each seam are those of the uncut text around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sagetrain.data.tokenizer import Tokenizer

PIECE = 1 << 18
"""Approximate number of characters of a piece. A text of less than twice as many is encoded as a whole."""
_AROUND = 1 << 9
"""Number of characters on both sides of a seam that are compared. Merges do not reach across white space, or as far."""
_TRIED = 64
_SEAMS = re.compile(r"(?<=\S)[\n ](?=\S)|(?<=\w)(?=[^\w\s])")
"""Candidates for a seam: single white space between words, or else the end of a word."""


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Yield the token ids of a text in pieces, together the same as those of Tokenizer.encode. Raises ValueError as
    encode does."""
    begin = 0
    while len(text) - begin > 2 * PIECE and (seam := _seam(tokenizer, text, begin + PIECE)):
        stop, follows = seam
        yield tokenizer.encode(text[begin:stop])
        begin = follows
    yield tokenizer.encode(text[begin:])


def _seam(tokenizer: Tokenizer, text: str, place: int) -> tuple[int, int] | None:
    """Return where a piece may end from `place` on, and where the next one begins, or None if there is no such place.

    If the tokenizer puts a space before each text, the piece after a space begins without that space.
    """
    for target in range(place, len(text) - PIECE, PIECE):
        for tried, found in enumerate(_SEAMS.finditer(text, target, target + PIECE)):
            if tried == _TRIED:
                break
            for stop, follows in ((found.end(), found.end()), (found.start(), found.start()), found.span()):
                before, after = text[stop - _AROUND : stop], text[follows : stop + _AROUND]
                if tokenizer.encode(text[stop - _AROUND : stop + _AROUND]) == [
                    *tokenizer.encode(before),
                    *tokenizer.encode(after),
                ]:
                    return stop, follows
    return None
