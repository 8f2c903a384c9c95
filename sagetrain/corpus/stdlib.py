"""Read the source "python-stdlib": the Python files of the standard library, which every machine has."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.corpus import files
from sagetrain.corpus.chunk import Chunk, Place

STDLIB = "python-stdlib"
_LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests",
                    "turtledemo"}  # fmt: skip


def _files() -> list[Path]:
    """Return the source files of the running Python's standard library without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    there = {path: path.relative_to(root) for path in root.glob("**/*.py")}
    found = {
        path: name
        for path, name in there.items()
        if not _LEFT_OUT.intersection(name.parts) and not name.parts[0].startswith(("config-", "_sysconfigdata"))
    }
    if not found:
        raise ConfigError(f"{STDLIB}: this Python has no library sources in {root}")
    return sorted(found, key=lambda path: found[path].as_posix())


def measured_stdlib() -> tuple[int, list[Any]]:
    """Return the bytes of the standard library, and what identifies it. Raises ConfigError if there is none."""
    found = _files()
    identity = [STDLIB, sys.version, str(Path(sysconfig.get_paths()["stdlib"])), len(found)]
    return sum(path.stat().st_size for path in found), identity


def read_stdlib(place: Place) -> Iterator[Chunk]:
    """Yield the files of the standard library, followed by the docstrings of the built-in modules."""
    consumed, size, texts, number = 0, 0, [], 1
    for path in _files():
        with tokenize.open(path) as file:  # tokenize.open honours the coding line.
            texts.append(file.read())
        size += len(texts[-1])
        consumed += path.stat().st_size
        if size >= files.CHUNK_BYTES:
            yield Chunk(STDLIB, "row", number, texts, consumed)
            number, size, texts = number + len(texts), 0, []
    texts += [_docstrings(name) for name in sorted(sys.builtin_module_names)]
    yield Chunk(STDLIB, "row", number, texts, consumed)


def _docstrings(module_name: str) -> str:
    """Return the documentation strings of a module without Python source, and of what it contains."""
    module = import_module(module_name)
    parts = [f"{module_name}\n\n{inspect.getdoc(module) or ''}"]
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) or inspect.isroutine(value):
            parts.append(f"{module_name}.{name}\n\n{inspect.getdoc(value) or ''}")
            members = sorted(vars(value).items()) if inspect.isclass(value) else []
            parts += [
                f"{module_name}.{name}.{key}\n\n{inspect.getdoc(member)}"
                for key, member in members
                if not key.startswith("_") and inspect.getdoc(member)
            ]
    return "\n\n".join(parts) + "\n"
