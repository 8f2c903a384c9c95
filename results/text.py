"""Write documentation and source code of installed Python packages under permissive licences as text for training.

    python results/text.py text.jsonl
    sagetrain prepare text.jsonl -o data/packages/train --vocab-size 8192 --valid-fraction 0.005

A package counts if its metadata name a licence of LICENCES. Each line has the text of a file, its source (package,
version and path) and the licence. Files below 400 or above 400,000 characters are left out, and so are files whose text
was seen before, and lines beyond the first 20 of tables of data. What a registry serves more of is a matter of
`pip install` before. No test runs this script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

LICENCES = {
    "MIT": r"\bMIT\b", "BSD": r"\bBSD\b", "Apache-2.0": r"\bApache\b", "PSF": r"\bPSF\b|Python Software Foundation",
    "ISC": r"\bISC\b",
}  # fmt: skip
OTHERS = re.compile(r"GPL|Proprietary|NVIDIA|Commercial|AND|WITH", re.ASCII)
KINDS = {".py", ".md", ".rst"}
LEAST, MOST = 400, 400_000


def licence(package: Distribution) -> str | None:
    """Return the permissive licence that the metadata name, if they name no other."""
    kept = [line for line in package.metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    named = package.metadata.get("License-Expression") or " ".join(kept) or package.metadata.get("License", "")[:200]
    names = (name for name, pattern in LICENCES.items() if re.search(pattern, named))
    return None if OTHERS.search(named) else next(names, None)


def documents(package: Distribution) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file of a package that is documentation or source code."""
    for file in sorted(package.files or [], key=str):
        if file.suffix not in KINDS:
            continue
        try:
            text = Path(file.locate()).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if LEAST <= len(text) <= MOST and max(map(len, text.splitlines())) < 1000:  # Longer lines are data.
            yield str(file), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--site", action="append", help="a folder of packages; by default those of this Python")
    parser.add_argument("--characters", type=float, default=math.inf, help="about so many, by the hash of the source")
    asked, seen, counts, kept = parser.parse_args(), set[bytes](), Counter[str](), list[tuple[bytes, dict[str, str]]]()
    found = distributions(path=asked.site) if asked.site else distributions()
    for package in sorted(found, key=lambda package: package.name):
        if (named := licence(package)) is None:
            continue
        for path, text in documents(package):
            key = hashlib.sha256(" ".join(text.split()).encode()).digest()
            if key not in seen:
                seen.add(key)
                source = f"{package.name} {package.version}:{path}"
                place = hashlib.sha256(source.encode()).digest() if asked.characters < math.inf else b""
                kept.append((place, {"text": text, "source": source, "license": named}))
    with asked.out.open("w", encoding="utf-8") as file:
        for _, document in sorted(kept, key=lambda each: each[0]):
            if sum(counts.values()) - counts["documents"] > asked.characters:
                break
            file.write(json.dumps(document) + "\n")
            counts[document["license"]] += len(document["text"])
            counts["documents"] += 1
    for name, count in counts.most_common():
        print(f"{count:>12,} {name if name == 'documents' else f'characters under {name}'}")


if __name__ == "__main__":
    main()
