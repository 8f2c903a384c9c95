"""Long texts become tokens piece by piece: a tokenizer takes 30 to 120 times the bytes that it encodes in one call.

A text is cut where that changes no token: the tokens around each seam are those of the text around it as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sagetrain.data.tokenizer import Tokenizer

PIECE = 1 << 18
"""Characters of a piece, about; a text of less than twice as many is encoded as a whole."""
_AROUND = 1 << 9
"""Characters on both sides of a seam that are compared. Merges do not reach across a white space or as far."""
_TRIED = 64
_SEAMS = re.compile(r"(?<=\S)[\n ](?=\S)|(?<=\w)(?=[^\w\s])")
"""Single white space between words; where there is none, the end of a word."""


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Token ids of a text, as Tokenizer.encode gives them, in pieces one after the other. ValueError as of encode."""
    begin = 0
    while len(text) - begin > 2 * PIECE and (seam := _seam(tokenizer, text, begin + PIECE)):
        stop, follows = seam
        yield tokenizer.encode(text[begin:stop])
        begin = follows
    yield tokenizer.encode(text[begin:])


def _seam(tokenizer: Tokenizer, text: str, place: int) -> tuple[int, int] | None:
    """Where a piece may end from `place` on, and where the next one begins; None: nowhere.

    Behind a space that a tokenizer puts before each text itself, the next piece begins without that space.
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
