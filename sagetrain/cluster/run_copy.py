"""The copy of a run's small files in its store (training.run_url): metrics, events, log, configuration, tokenizer. With
the checkpoints they are all that a new host needs to continue the run, and all that `sagetrain report` reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sagetrain.config.errors import ConfigError, url_of
from sagetrain.config.load import saved_config
from sagetrain.config.rules.data import WRITTEN
from sagetrain.config.schema import cache_folder
from sagetrain.config.sections.base import store_url
from sagetrain.data.token_file import write_atomic
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


def here(run_dir: Path) -> Path:
    """Return a run folder on this host: the path itself, or, if it was a URL, a folder in the cache with fresh copies
    of the run's small files. Its checkpoints are read from the store. Raises ConfigError if the URL is of no run, or
    its store cannot be read."""
    if not (url := url_of(run_dir)):
        return run_dir
    source = UrlPath(store_url(url))
    target = cache_folder().parent / "runs" / hashlib.sha256(str(source).encode()).hexdigest()[:16] / source.name
    try:
        there = store_at(source, _PATIENCE).names()
        if "config.yaml" not in there:
            raise ConfigError(f"{source} has no config.yaml of a run; name the training.run_url of one")
        target.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if name in there:
                write_atomic(target / name, (source / name).read_bytes())
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if (named := saved_config(target / "config.yaml")["training"].get("run_url")) != str(source):
        raise ConfigError(f"{source} is a copy of the run in {named}: name that, or copy all of it to a disk")
    return target
