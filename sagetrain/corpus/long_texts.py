"""Encode long texts piece by piece, because a tokenizer needs 30 to 120 times the bytes that it encodes in one call.

A text is cut where the cut changes no token: the tokens around each seam are those of the uncut text around it. Where
millions of characters have no such place, as a number or a genome in one word has none, it is cut between two of them.
SentencePiece's unigram models add up scores in float32. Between segmentations that are equally good to these digits, a
call on a long text may choose otherwise than a call on its pieces (28 of 340,000 tokens in one text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sagetrain.corpus.chunk import SEAM_BYTES
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
        seam = _seam(tokenizer, text, begin + PIECE, min(far, len(text)))
        if seam is None and far >= len(text):
            break
        stop, follows = seam or (far, far)
        yield tokenizer.encode(text[begin:stop])
        begin = follows
    yield tokenizer.encode(text[begin:])


def between_seams(tokenizer: Tokenizer, text: str, before: bytes, behind: bytes) -> str:
    """Move the ends of a part of a text to the seams around them, so that the parts have the tokens of the whole. Two
    parts that meet know the same bytes, and find the same seam. Where there is none, the end stays.

    Args:
        before: the last SEAM_BYTES of the part before. Empty: there is none.
        behind: the first SEAM_BYTES of the next part. Empty: there is none, or it holds only the end of the document.
    """
    # A character has a byte at least, so these are the first and the last bytes.
    begin, end = text[:SEAM_BYTES].encode()[:SEAM_BYTES], text[-SEAM_BYTES:].encode()[-SEAM_BYTES:]
    follows = _moved(tokenizer, before, begin)[1] if before and text else 0
    stop = _moved(tokenizer, end, behind)[0] if behind else 0
    first = _decoded(before)
    return (first + text + _decoded(behind))[len(first) + follows : len(first) + len(text) + stop]


def _moved(tokenizer: Tokenizer, before: bytes, behind: bytes) -> tuple[int, int]:
    """Return where a part ends and where the next one begins, in characters from the cut between them."""
    cut, both = len(_decoded(before)), _decoded(before + behind)
    stop, follows = _seam(tokenizer, both, _AROUND, len(both) - _AROUND) or (cut, cut)
    return stop - cut, follows - cut


def _decoded(cut: bytes) -> str:
    """Return the text of bytes. A character that is cut at their beginning or end is left out."""
    return cut.decode(errors="ignore")


def _seam(tokenizer: Tokenizer, text: str, place: int, end: int) -> tuple[int, int] | None:
    """Return where a piece may end from `place` on, and where the next one begins, or None if there is no such place
    before `end`.

    If the tokenizer puts a space before each text, the piece after a space begins without that space.
    """
    for target in range(place, end, PIECE):
        for tried, found in enumerate(_SEAMS.finditer(text, target, min(target + PIECE, end))):
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
