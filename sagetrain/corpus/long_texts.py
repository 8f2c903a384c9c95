"""Encode long texts piece by piece, because a tokenizer needs 30 to 120 times the bytes that it encodes in one call.

A text is cut where the cut changes no token: the tokens around each seam are those of the uncut text around it. Where
millions of characters have no such place, as a number or a genome in one word has none, it is cut between two of them.
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
_FARTHEST = 1 << 21
"""Number of characters in which a seam is looked for."""
_SEAMS = re.compile(r"(?<=\S)[\n ](?=\S)|(?<=\w)(?=[^\w\s])")
"""Candidates for a seam: single white space between words, or else the end of a word."""


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Yield the token ids of a text in pieces, together the same as those of Tokenizer.encode unless it is cut where no
    seam is. Raises ValueError as encode does."""
    begin = 0
    while len(text) - begin > 2 * PIECE:
        far = begin + PIECE + _FARTHEST
        seam = _seam(tokenizer, text, begin + PIECE, min(far, len(text)) - PIECE)
        if seam is None and far >= len(text):
            break
        stop, follows = seam or (far, far)
        yield tokenizer.encode(text[begin:stop])
        begin = follows
    yield tokenizer.encode(text[begin:])


def _seam(tokenizer: Tokenizer, text: str, place: int, end: int) -> tuple[int, int] | None:
    """Return where a piece may end from `place` on, and where the next one begins, or None if there is no such place
    in the pieces that begin before `end`.

    If the tokenizer puts a space before each text, the piece after a space begins without that space.
    """
    for target in range(place, end, PIECE):
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
