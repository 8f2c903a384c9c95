"""A text in files that is the same under every Python: sentences of a small invented language, and a few lines that
look like code. Words follow each other as in a real text, so a model learns from it for a while."""

import random
from itertools import accumulate
from pathlib import Path

FILES, LINES, WORDS, FOLLOWERS = 20, 380, 600, 12
_BEGIN = [*"bcdfghklmnprstvw", "st", "tr", "pl", "gr", "th", "sh"]
_MIDDLE = [*"aeiou", "ai", "ea", "oo"]
_END = ["", "", "n", "r", "s", "t", "ng", "ly", "ed", "ion", "er"]


class Language:
    """Words with frequencies as in a real language, each with the words that follow it.

    Only `random.Random.random` is asked, whose numbers are the same in every version of Python.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random
        words: dict[str, None] = {}
        while len(words) < WORDS:
            syllables = 1 + int(3 * self._draw() * self._draw())
            words["".join(self._one(_BEGIN) + self._one(_MIDDLE) for _ in range(syllables)) + self._one(_END)] = None
        self._words = list(words)
        self._common = list(accumulate(1 / (rank + 2) for rank in range(WORDS)))
        self._next = {word: [self._any() for _ in range(FOLLOWERS)] for word in self._words}

    def _one(self, of: list[str]) -> str:
        return of[int(len(of) * self._draw())]

    def _any(self) -> str:
        at = self._draw() * self._common[-1]
        return self._words[next(place for place, total in enumerate(self._common) if total > at)]

    def _phrase(self, length: int) -> list[str]:
        found = [self._any()]
        while len(found) < length:
            # The first followers come most often. Some words follow nothing in particular.
            chosen = self._next[found[-1]][int(FOLLOWERS * self._draw() * self._draw())]
            found.append(chosen if self._draw() < 0.85 else self._any())
        return found

    def line(self) -> str:
        """Return one line: three of four are sentences, the others code."""
        if self._draw() < 0.25:
            name, *given = self._phrase(2 + int(3 * self._draw()))
            kind = self._draw()
            if kind < 0.4:
                return f"def {name}({', '.join(given)}):"
            return (
                f"    {name}.{given[0]} = {int(100 * self._draw())}" if kind < 0.7 else f"    return {'_'.join(given)}"
            )
        words = self._phrase(4 + int(12 * self._draw()))
        middle = "," if self._draw() < 0.3 else ""
        return f"{words[0].capitalize()} {words[1]}{middle} {' '.join(words[2:])}."


def write(folder: Path) -> Path:
    """Write the files, and return their folder."""
    folder.mkdir()
    language = Language(8)  # Gradient norms are even, so that no step is taken for a spike that is none.
    for number in range(FILES):
        lines = [language.line() for _ in range(LINES)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + "\n")
    return folder
