"""Where a run's data is now: run folders are moved and copied, and commands are called from other folders.

Paths of a configuration are those that training was started with. They are looked for where they say, then where they
would be seen from the run folder as they were then, then in the folders above it. What a checkpoint records of the
data's checksums decides between files of one name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from sagetrain.cluster.preflight import SHOWN
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataConfig, DataSource, tokenizer_in
from sagetrain.data.token_file import read_provenance
from sagetrain.train.inputs import is_there


def located(
    data: DataConfig,
    began_in: str,
    run_dir: Path,
    recorded: Mapping[str, str],
    root: Path | None,
    report: Callable[[str], None],
) -> DataConfig:
    """Return the data section of a run with the paths that its files have now; those that are nowhere stay as they are.

    Args:
        began_in: training.run_dir as the run was configured.
        run_dir: the run folder now.
        recorded: hashes of the data, as a checkpoint has them.
        root: folder that the data lies in, wherever below; nothing else is looked at. None: look as said above.
        report: hears which other paths are taken, and of data that is not the run's.

    Raises:
        ConfigError: the data is not in `root`.
    """
    if data.missing:
        return data
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
    """ConfigError if files of data.train or data.valid are missing; it says how to point to them."""
    missing = [source.path for source in sources if not is_there(source)]
    if missing:
        raise ConfigError(
            f"data.{name}: {', '.join(missing)} is not here (looked for from {Path.cwd()}, and beside the run folder): "
            "name the folder that holds it now with --data-root, or copy it there"
        )


def _found(
    sources: Sequence[DataSource], began_in: str, run_dir: Path, digest: str, root: Path | None
) -> list[DataSource] | None:
    """The sources where all of them are, with the recorded checksums if there are such; None: nowhere."""
    there = []
    for paths in _places([source.path for source in sources], began_in, run_dir.absolute(), root):
        moved = [source.model_copy(update={"path": path}) for source, path in zip(sources, paths, strict=True)]
        if all(map(is_there, moved)):
            if not digest or _digest(moved) == digest:
                return moved
            there.append(moved)
    return there[0] if there else None


def _places(paths: Sequence[str], began_in: str, run_dir: Path, root: Path | None) -> Iterator[list[str]]:
    """Where the files of these paths may be."""
    if root is not None:
        longest = max((len(_below(path)) for path in paths), default=0)
        for size in range(longest, 0, -1):  # of each path the end, as long as it can be
            yield [str(root.joinpath(*_below(path)[-size:])) for path in paths]
        return
    yield list(paths)
    if all(os.path.isabs(path) == os.path.isabs(began_in) for path in paths):
        yield [os.path.normpath(run_dir / os.path.relpath(path, began_in)) for path in paths]
    if not any(map(os.path.isabs, paths)):
        for folder in run_dir.parents:
            yield [str(folder / path) for path in paths]


def _below(path: str) -> list[str]:
    """The parts of a path that name something."""
    return [part for part in Path(path).parts if part not in ("/", "..")]


def _digest(sources: Sequence[DataSource]) -> str:
    """The beginning of what SampleStream.content says of the checksums of files; nothing if some have none."""
    sums = [read_provenance(path).get("sha256") for source in sources for path in source.files]
    return sha256("".join(map(str, sums)).encode()).hexdigest()[:SHOWN] if all(sums) else ""
