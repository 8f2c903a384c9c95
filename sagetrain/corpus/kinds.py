"""The kind of a file: its name says how it is read, and its first bytes may contradict the name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import PurePath

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, pointer

HEAD = 1 << 12
"""Number of bytes that are looked at."""
_SHORT = {".tgz": ".tar.gz", ".tbz": ".tar.bz2", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class Kind(Enum):
    """The way in which a file is read."""

    LINES = "JSON lines"
    JSON = "a JSON array or JSON lines"
    PARQUET = "Parquet"
    TABLE = "a table"
    ARCHIVE = "an archive"
    TEXT = "plain text"


DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".psv": "|"}
"""The character between the cells of a table, by the suffix of the file name."""
_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson"), Kind.LINES),
    ".json": Kind.JSON,
    ".parquet": Kind.PARQUET,
    **dict.fromkeys(DELIMITERS, Kind.TABLE),
    **dict.fromkeys((".tar", ".zip"), Kind.ARCHIVE),
}
MEDIA = frozenset((
    ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".bmp", ".ico", ".tif", ".tiff", ".heic", ".pdf",
    ".mp3", ".wav", ".flac", ".ogg", ".m4a", ".mp4", ".mov", ".mkv", ".webm", ".avi",
))  # fmt: skip
"""The suffixes of pictures, sound, film and PDF, which lie beside texts in a folder of notes."""
_UNPACK = "convert it to text or .jsonl, or leave it out with {glob}"
_BEGINS = {
    ".gz": (rb"\x1f\x8b", "compressed with gzip"),
    ".bz2": (rb"BZh\d(1AY&SY|\x17rE8P\x90)", "compressed with bzip2"),
    ".xz": (rb"\xfd7zXZ\0", "compressed with xz"),
    ".zst": (rb"\x28\xb5\x2f\xfd", "compressed with Zstandard"),
    ".zip": (rb"PK(\x03\x04|\x05\x06)", "a ZIP archive (Office documents, EPUB and NumPy's .npz are that, too)"),
    ".tar": (rb"(?s:.{257})ustar", "a tar archive"),
    ".parquet": (rb"PAR1", "Parquet"),
}
"""The first bytes of files that are not text, and what they are, by the suffix that says so."""
# The beginnings of other files that are not text: what such a file is, and what to do with it.
_BINARY = {
    rb"\x04\x22\x4d\x18|\x1f\x9d|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x5d\0\0[\0-\xff]{2}\xff{8}": (
        "packed in a way that is not read (LZ4, compress, 7-Zip, RAR, LZMA)",
        "unpack it, or pack it as .tar, .zip, .xz or .zst",
    ),
    rb"\xff{4}..\0\0|ARROW1|ORC|Obj\x01|SQLite format 3\0": (
        "a table of another kind (Arrow, ORC, Avro, SQLite)",
        "write it as Parquet, .csv or .jsonl, or name the folder that save_to_disk wrote",
    ),
    rb"MMIDIDX\0": ("the index of a token file", "it is prepared: give it to data.train[].path"),
    rb"\xff\xfe\0\0|\0\0\xfe\xff": ("UTF-32, not UTF-8", "convert it: iconv -f UTF-32 -t UTF-8"),
    rb"\xff\xfe|\xfe\xff": ("UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8"),
    rb"([^\0]\0){8}": ("UTF-16, not UTF-8", "convert it: iconv -f UTF-16LE -t UTF-8"),
    rb"(\0[^\0]){8}": ("UTF-16, not UTF-8", "convert it: iconv -f UTF-16BE -t UTF-8"),
}
# The beginnings of text files whose text is not the text that is wanted.
_MARKED_UP = {
    rb"%PDF-|%!PS|\{\\rtf": ("a PDF, PostScript or RTF document", _UNPACK),
    rb"WARC/\d": (
        "a web archive (WARC, WET or WAT), whose headers are no text",
        "extract the texts of its records into .jsonl (warcio reads it, trafilatura takes the text out of pages)",
    ),
    rb"\s*<mediawiki\b": (
        "a dump of a wiki, with its markup and its history",
        "extract the articles into .jsonl (wikiextractor --json), or take the dataset wikimedia/wikipedia",
    ),
}


_NOTEBOOK = (
    "is a Jupyter notebook, whose cells stand in JSON among outputs and pictures; convert it (jupyter nbconvert --to "
    "markdown, or --to script), or leave it out with {glob}"
)


def compression(name: str | os.PathLike[str]) -> str:
    """Return the compression of a file by its name: .gz, .bz2, .xz, .zst, or ""."""
    suffix = os.path.splitext(_in_full(name))[1]
    return suffix if suffix in _COMPRESSED else ""


def kind_of(name: str | os.PathLike[str]) -> Kind:
    """Return the kind of a file by its name, which may be in capitals."""
    path = _in_full(name).removesuffix(compression(name))
    return _BY_SUFFIX.get(os.path.splitext(path)[1], Kind.TEXT)


def stem(name: str | os.PathLike[str]) -> str:
    """Return the name of a file without the suffix of its compression and, unless it is plain text, of its format."""
    path, suffix = os.path.splitext(os.fspath(name))
    if suffix.lower() in _SHORT:
        return path
    if suffix.lower() in _COMPRESSED:
        path, suffix = os.path.splitext(path)
    return path if suffix.lower() in _BY_SUFFIX else path + suffix


def alike(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of files that may hold the same texts, by their names: files of one stem, and an archive with a file
    in the folder that it fills. Their texts say whether they do."""
    found: dict[str, str] = {}
    archives: dict[str, str] = {}
    for name in names:
        key = stem(name)
        if (other := found.setdefault(key, name)) is not name:
            yield other, name
        if kind_of(name) is Kind.ARCHIVE:
            archives[key] = name
    for name in found.values() if archives else ():
        for parent in PurePath(name).parents:
            if archive := archives.get(str(parent)):
                yield archive, name


def is_file_name(name: str) -> bool:
    """Whether a name has the suffix of a file that can be read, so that it is hardly the name of a dataset."""
    return kind_of(name) is not Kind.TEXT or bool(compression(name)) or _in_full(name).endswith(".txt")


def _in_full(name: str | os.PathLike[str]) -> str:
    path, suffix = os.path.splitext(os.fspath(name).lower())
    return path + _SHORT.get(suffix, suffix)


def _binary(head: bytes) -> tuple[str, str]:
    """Return what a file that is not text is by its first bytes, and what to do with it. Return "" twice if they say
    nothing."""
    for suffix, (begin, what) in _BEGINS.items():
        if re.match(begin, head):
            other = " if it holds text files, or convert it to text" if suffix == ".zip" else ""
            return what, f"rename it so that it ends in {suffix}{other}"
    return next((said for begin, said in _BINARY.items() if re.match(begin, head, re.DOTALL)), ("", ""))


def named_otherwise(name: str, head: bytes) -> str:
    """Say that the first bytes of a file, as they are on disk, are those of something else than its name says, or that
    a file which cannot be read is damaged behind them. Return "" if they say nothing."""
    if said := pointer("it", head):
        return f"; {said}"
    suffix, (what, fix) = os.path.splitext(_in_full(name))[1], _binary(head)
    if not head or not (what or suffix in _BEGINS):
        return ""
    if suffix not in _BEGINS or not re.match(_BEGINS[suffix][0], head):
        what = f"it is {what}" if what else f"its first bytes are not those of a {suffix} file"
        return f"; {what}: {fix or f'rename it to end without {suffix}, or copy it again'}"
    # The lowest two bits of the fifth byte are the size of the dictionary's number in a frame of zstd.
    if suffix == ".zst" and len(head) > 4 and head[4] & 3:
        return "; it was compressed with a dictionary, which is not in it: decompress it (zstd -d -D DICTIONARY FILE)"
    return "; it begins as such a file does, so its end is missing or damaged: copy it again"


def check_head(name: str, head: bytes) -> None:
    """Check the first decompressed bytes of a file that is no archive. Raises ConfigError, which says what to do, if
    they show that the file is something else than its name says."""
    if said := pointer(name, head, page=kind_of(name) is not Kind.TEXT):
        raise ConfigError(said)
    if _in_full(name).removesuffix(compression(name)).endswith(".ipynb"):
        raise ConfigError(f"{name}: {_NOTEBOOK.format(glob=spelled('glob'))}")
    for begin, (what, fix) in _MARKED_UP.items():
        if re.match(begin, head):
            raise ConfigError(f"{name}: is {what}; {fix.format(glob=spelled('glob'))}")
    if _is_text(head) or (kind_of(name) is Kind.PARQUET and head.startswith(b"PAR1")):
        return
    if name.endswith(".bin") and os.path.isfile(f"{name.removesuffix('.bin')}.idx"):
        raise ConfigError(f"{name}: is a token file; name it without .bin, in data.train[].path or in eval --data")
    what, fix = _binary(head)
    # The head is that of the unpacked content, which has no name of its own.
    if (packed := compression(name)) and fix.startswith("rename"):
        fix = f"rename it so that it ends in .tar{packed}" if "tar" in what else "unpack it"
        what = f"{what} when it is unpacked"
    if what:
        raise ConfigError(f"{name}: is {what}; {fix}")
    if b"\0" in head and kind_of(name) is not Kind.LINES:  # A line of zeros may be left out with --skip-bad-lines.
        raise ConfigError(f"{name}: holds bytes of zero, as no text does; {_UNPACK.format(glob=spelled('glob'))}")


def _is_text(head: bytes) -> bool:
    """Whether these bytes are UTF-8 text. The last character may be cut."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
    return b"\0" not in head
