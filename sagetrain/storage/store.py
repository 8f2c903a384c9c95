"""The operations that the library needs of a place that keeps files by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class Store(ABC):
    """Files by name below one root. Names may have slashes. A file is whole or absent, whenever a writer dies, and a
    change is seen by every reader that begins after it.

    All methods raise OSErrors: FileNotFoundError if there is no such file or bucket, PermissionError if the credentials
    are missing, expired or have no right to it, and other ones if the place did not answer within the store's patience.
    """

    @abstractmethod
    def put(self, name: str, data: bytes, *, absent: bool = False) -> None:
        """Write a small file. With `absent`, write it only if there is none of this name, else raise FileExistsError.
        Of several writers at once one wins. A writer's data must then be its own, because after an unclear failure
        equal bytes count as written by this call."""

    @abstractmethod
    def swap(self, name: str, data: bytes, tag: str) -> None:
        """Replace a small file that still has the tag that `tagged` returned. Raises FileExistsError if another writer
        has replaced it since, and FileNotFoundError if it is gone. `put` says what the data must be."""

    @abstractmethod
    def tagged(self, name: str) -> tuple[bytes, str]:
        """Return a small file and a tag that every later version of it lacks."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file, all of them; None: up to its end."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of each file whose name begins with `prefix`, in the order of names."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Files that are gone already are no error."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[memoryview], size: int) -> None:
        """Write a file of `size` bytes, which may be larger than the memory that is left. The blocks are taken one
        after another, and must keep their content until the call returns."""

    @abstractmethod
    def discard_unfinished(self) -> None:
        """Delete what killed writers left of files. Nobody else may be writing there."""

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        return list(self.sizes(prefix))
