"""Read archives, .tar (compressed or not) and .zip, as folders of files, one file after the other."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import DAMAGED, Content, on_disk, opened, otherwise

_REST = 1 << 16
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def names_in(path: Path) -> dict[str, int]:
    """Return the files of an archive with their sizes in bytes, in their order in the archive. Hidden files and those
    that macOS adds are left out. A compressed .tar is read as a whole. Raises ConfigError if the archive cannot be
    read, or holds a file that is encrypted or compressed in another way."""
    with _readable(path):
        if not path.name.lower().endswith(".zip"):
            return _once(path, ((each.name, each.size) for each, _ in _tar(path) if _is_meant(each.name)))
        with zipfile.ZipFile(path) as file:
            _refuse_joined(path, file)
            members = [each for each in file.infolist() if not each.is_dir() and _is_meant(each.filename)]
    locked = next((each.filename for each in members if each.flag_bits & 1), None)
    if locked:
        raise ConfigError(f"{path}: {locked} is encrypted: unpack the archive")
    for each in members:
        if each.compress_type not in _METHODS:
            method = f"method {each.compress_type} (9 is Deflate64)"
            raise ConfigError(f"{path}: {each.filename} is compressed by {method}, which is not read: unpack it (7z x)")
    return _once(path, ((each.filename, each.file_size) for each in members))


def _refuse_joined(path: Path, file: zipfile.ZipFile) -> None:
    """Refuse two archives in one file, of which zipfile reads the last. Raises ConfigError if the file is so. A program
    may stand before an archive, which then unpacks itself."""
    with open(path, "rb") as raw:
        joined = raw.read(4) == b"PK\3\4" and min((each.header_offset for each in file.infolist()), default=0) > 0
    if joined:
        raise ConfigError(
            f"{path}: another archive stands before this one (joined by cat?): unpack both (7z x, unzip -FF)"
        )


def _once(path: Path, members: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sizes of members by name. ConfigError if a name is there twice, as when an archive was appended to."""
    sizes: dict[str, int] = {}
    paths: set[PurePosixPath] = set()
    for name, size in members:
        if PurePosixPath(name) in paths:
            raise ConfigError(
                f"{path}: {name} is in it twice, and unpacking it leaves the last one: unpack it, and name the folder"
            )
        paths.add(PurePosixPath(name))
        sizes[name] = size
    return sizes


def members(path: Path, chosen: set[str]) -> Iterator[Content]:
    """Yield the chosen files of an archive, in their order. Each has to be read before the next one is asked for."""
    with _readable(path):
        if not path.name.lower().endswith(".zip"):
            yield from (content for member, content in _tar(path) if member.name in chosen)
            return
        with open(path, "rb") as raw, zipfile.ZipFile(raw) as file:
            for each in file.infolist():
                if each.filename in chosen:
                    yield Content(f"{path}/{each.filename}", partial(file.open, each), partial(_place_in_zip, each))


def _place_in_zip(member: zipfile.ZipInfo, raw: IO[bytes]) -> int:
    """Return the bytes of an archive up to where a member has been read. A few of them may hold hundreds of MB."""
    return member.header_offset + member.compress_size * raw.tell() // max(member.file_size, 1)


def _tar(path: Path) -> Iterator[tuple[tarfile.TarInfo, Content]]:
    with opened(on_disk(path)) as (raw, read), tarfile.open(fileobj=raw, mode="r|") as tar:
        while member := tar.next():
            if member.isfile():
                yield member, Content(f"{path}/{member.name}", partial(_extracted, tar, member), lambda _: read())
            # tarfile would remember every member that it has seen.
            tar.members.clear()  # type: ignore[attr-defined]
        # tarfile takes the end of the file for the end of the archive.
        if tar.fileobj.tell() == tar.offset:
            raise tarfile.ReadError(
                "the blocks of zeros that end an archive are missing (cut short, or not closed by its writer?): unpack "
                "it"
            )
        # Zeros fill the last record. tarfile stops at them, and would leave out an archive that follows.
        while rest := tar.fileobj.read(_REST):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("something follows the end of the archive (archives joined by cat?): unpack it")


def _extracted(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None, "it is a file (_tar)"
    return file


def _is_meant(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in parts)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: a name in it is not UTF-8, as the archive says that it is ({error.object!r}): unpack it (7z x)"
        ) from error
    except DAMAGED as error:
        raise ConfigError(f"cannot read {path}: {error}{otherwise(on_disk(path))}") from error


def matches(name: str, glob: str) -> bool:
    """Whether the path of a file in an archive matches a pattern of Path.glob's form. ** stands for any folders."""
    from fsspec.utils import glob_translate

    try:
        pattern = glob_translate(glob.removeprefix("./"))
    except ValueError as error:
        raise wrong_glob(glob, error) from error
    return re.match(pattern, "/".join(PurePosixPath(name).parts)) is not None


def wrong_glob(glob: str, error: Exception) -> ConfigError:
    """Return the error for a pattern that cannot be read."""
    fix = "write it relative to the folder, ** alone between slashes: '**/*.md'"
    return ConfigError(f"{spelled('glob')} {glob!r}: {error}; {fix}")
