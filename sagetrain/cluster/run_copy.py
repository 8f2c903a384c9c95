"""The copy of a run's small files in its store (training.run_url): metrics, events, log, configuration, tokenizer. With
the checkpoints they are all that a new host needs to continue the run, and all that `sagetrain report` reads."""

from __future__ import annotations

from pathlib import Path

from sagetrain.config.rules.data import WRITTEN
from sagetrain.storage.range_reader import RangeReader
from sagetrain.storage.url_path import UrlPath, store_at

_FILES = (*WRITTEN, "log.txt")
_PATIENCE = 20.0
"""The seconds for which sending is tried. The next checkpoint sends the files again."""


def send(run_dir: Path, url: UrlPath) -> None:
    """Copy the files of a run folder to a store. Raises OSError."""
    store = store_at(url, _PATIENCE)
    for name in _FILES:
        path = run_dir / name
        if path.is_file():
            content = path.read_bytes()
            store.write(name, iter([memoryview(content)]), len(content))


def bring(url: UrlPath, run_dir: Path) -> None:
    """Copy those files of a store to a run folder that it lacks. Raises OSError."""
    there = store_at(url).names()
    for name in _FILES:
        if name in there and not (run_dir / name).exists():
            part = run_dir / f"{name}.partial"
            with part.open("wb") as file:
                file.writelines(RangeReader(url / name).blocks())
            part.rename(run_dir / name)
