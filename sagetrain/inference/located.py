"""Find a run's data: run folders are moved and copied, and commands are called from other folders.

The paths of a configuration are those that training was started with. They are looked for first where they say, then
where they would be as seen from the run folder then, and then in the folders above the run folder. If files of one name
differ, the checksums that a checkpoint records decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from sagetrain.cluster.preflight import SHOWN
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataConfig, DataSource, tokenizer_in
from sagetrain.data.remote_blocks import fetch_sources
from sagetrain.data.token_file import read_provenance
from sagetrain.training.inputs import is_there


def located(
    data: DataConfig,
    began_in: str,
    run_dir: Path,
    recorded: Mapping[str, str],
    root: Path | None,
    report: Callable[[str], None],
) -> DataConfig:
    """Return the data section of a run with the present paths of its files. Files that are nowhere keep their paths.

    Args:
        began_in: training.run_dir as the run was configured.
        run_dir: the run folder now.
        recorded: hashes of the data, as a checkpoint has them.
        root: folder that the data is in, at any depth; nothing else is searched. None: search as described above.
            Raises ConfigError if the data is not there.
        report: gets messages about other paths that are used, and about data that differs from the run's.
    """
    if data.missing:
        return data
    if root is None:
        fetch_sources(data)
    update: dict[str, object] = {}
    for name in ("train", "valid"):
        sources: list[DataSource] = getattr(data, name)
        digest = recorded.get(f"data.{name} (checksums in .json)", "")
        found = _found(sources, began_in, run_dir, digest, root)
        if root and sources and found is None and name == "valid":
            wanted = ", ".join(source.path for source in sources)
            raise ConfigError(f"--data-root {root}: data.valid ({wanted}) is not there, nor any end of its paths")
        if found and found != sources:
            report(f"data.{name} is read from {', '.join(source.path for source in found)}")
            update[name] = found
        if found and digest and _digest(found) not in ("", digest):
            report(f"data.{name} is not what the run had: its checksums in .json are others (prepared again?)")
    section = data.model_copy(update=update)
    kept = tokenizer_in(run_dir)
    if not Path(section.tokenizer_path).is_file() and kept.is_file():
        section = section.model_copy(update={"tokenizer": str(kept)})
    return section


def check_there(name: str, sources: Sequence[DataSource]) -> None:
    """Check that the files of data.train or data.valid exist. Raises ConfigError, which says how to point to them."""
    missing = [source.path for source in sources if not is_there(source)]
    if missing:
        raise ConfigError(
            f"data.{name}: {', '.join(missing)} is not here (looked for from {Path.cwd()}, and beside the run folder): "
            "name the folder that holds it now with --data-root, or copy it there"
        )


def _found(
    sources: Sequence[DataSource], began_in: str, run_dir: Path, digest: str, root: Path | None
) -> list[DataSource] | None:
    """Return the sources at the first place where all of them are, with the recorded checksums if there are such.
    Return None if there is no such place."""
    there = []
    for paths in _places([source.path for source in sources], began_in, run_dir.absolute(), root):
        moved = [source.model_copy(update={"path": path}) for source, path in zip(sources, paths, strict=True)]
        if all(map(is_there, moved)):
            if not digest or _digest(moved) == digest:
                return moved
            there.append(moved)
    return there[0] if there else None


def _places(paths: Sequence[str], began_in: str, run_dir: Path, root: Path | None) -> Iterator[list[str]]:
    if root is not None:
        longest = max((len(_below(path)) for path in paths), default=0)
        for size in range(longest, 0, -1):  # As much of the end of each path as possible is taken.
            yield [str(root.joinpath(*_below(path)[-size:])) for path in paths]
        return
    yield list(paths)
    if all(os.path.isabs(path) == os.path.isabs(began_in) for path in paths):
        yield [os.path.normpath(run_dir / os.path.relpath(path, began_in)) for path in paths]
    if not any(map(os.path.isabs, paths)):
        for folder in run_dir.parents:
            yield [str(folder / path) for path in paths]


def _below(path: str) -> list[str]:
    """Return the parts of a path that are names."""
    return [part for part in Path(path).parts if part not in ("/", "..")]


def _digest(sources: Sequence[DataSource]) -> str:
    """Return the beginning of SampleStream.content's hash of the files' checksums, or "" if some files have none."""
    sums = [read_provenance(path).get("sha256") for source in sources for path in source.files]
    return sha256("".join(map(str, sums)).encode()).hexdigest()[:SHOWN] if all(sums) else ""
