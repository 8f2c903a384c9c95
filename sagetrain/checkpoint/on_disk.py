"""Find, check and delete checkpoints. Each is one folder per step: complete or absent, readable at any layout, and
without code that loading would run.

    checkpoints/
      step-00000040/
        manifest.json                    what is here: every tensor by name with its global shape and where each piece
                                         lies, every file with size and SHA-256, and the training state
        shard-tp000-dp000.safetensors    fp32 pieces "<parameter>|weight" of one rank, each 1-D
        moments-tp000-dp000.safetensors  the optimizer's state of the same pieces: "<parameter>|exp_avg" and so on
        config.yaml                      the resolved configuration of the run
        rng-00000.pt                     random-number state of one rank (loaded with weights_only)
      latest                             name of the newest folder (for people; loading looks at the folders themselves)

A checkpoint is written (saving.py) into a folder with a temporary name and synced to disk. The folder is renamed once
its manifest is in it. A folder without a manifest, or with files that do not match the manifest, is damaged and never
loaded. A copy that was interrupted is one cause. To read weights alone, only the files of weights are checked.

The functions take the folders of a store as well (in_store.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from sagetrain.checkpoint import in_store
from sagetrain.checkpoint.manifest import MANIFEST, read_manifest, written_by_newer
from sagetrain.checkpoint.state import RunState
from sagetrain.config.errors import CheckpointError, pointer_at
from sagetrain.parallel.objects import of_every_rank, of_rank_0, rank_and_world_size
from sagetrain.storage.range_reader import sha256_in_store
from sagetrain.storage.url_path import Location, UrlPath, store_at

# Only a run that continues reads the files whose names begin like this.
_OF_RUNS = ("moments-", "rng-")


# -- names ---------------------------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """Return the name of the folder of one step."""
    return f"step-{step:08d}"


def step_of(folder: Location) -> int:
    """Return the step whose checkpoint is in a folder."""
    return int(folder.name.split("-")[1])


# -- deleting ------------------------------------------------------------------------------------------------------


def prune(root: Location, keep_last: int, keep_every_tokens: int | None) -> None:
    """Delete old checkpoints but the newest `keep_last` ones, and the first one at or past each multiple of
    `keep_every_tokens`. Rank 0 calls this. Folders whose manifest cannot be read are left alone."""
    found = []
    for folder in published(root):
        with contextlib.suppress(CheckpointError):
            found.append((read_state(folder).tokens, folder))
    kept, multiples = {folder for _, folder in found[-keep_last:]}, set()
    for tokens, folder in found:
        multiple = tokens // keep_every_tokens if keep_every_tokens else 0
        if multiple and multiple not in multiples:
            multiples.add(multiple)
            kept.add(folder)
    for _, folder in found:
        if folder not in kept:
            try:
                remove(folder)
            # A failed deletion is no reason to stop a run whose new checkpoint is safe.
            except OSError as error:
                warnings.warn(f"an old checkpoint stays, delete it yourself: {error}", stacklevel=2)


def remove(folder: Location) -> None:
    """Delete a checkpoint in such a way that an interrupted deletion never looks like a checkpoint."""
    if isinstance(folder, UrlPath):
        in_store.remove(folder)
        return
    # The permission bits are checked, too, because root may write everywhere and containers run as root.
    writable = folder.stat().st_mode & 0o222
    # Somebody has protected the folder to keep the checkpoint.
    if not (writable and os.access(folder, os.W_OK, effective_ids=True)):
        raise PermissionError(errno.EACCES, "the folder is write-protected", str(folder))
    doomed = folder.with_name(f".writing-{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


# -- finding and checking ------------------------------------------------------------------------------------------


@overload
def published(root: Path) -> Sequence[Path]:
    """Return the published checkpoints on a disk."""


@overload
def published(root: Location) -> Sequence[Location]:
    """Return the published checkpoints on a disk or in a store."""


def published(root: Location) -> Sequence[Location]:
    """Return the published checkpoints, oldest first."""
    if isinstance(root, UrlPath):
        return in_store.published(root)
    return sorted(f for f in root.glob("step-*") if f.name.removeprefix("step-").isdigit() and f.is_dir())


def newest(root: Location) -> Location | None:
    """Return the newest published checkpoint, undamaged or not."""
    return max(published(root), key=step_of, default=None)


def read_state(folder: Location) -> RunState:
    """Return the state of the run that wrote a checkpoint. Raises the CheckpointErrors of read_manifest and
    RunState.from_json."""
    return RunState.from_json(read_manifest(folder)["state"], folder)


def problems(
    folder: Location, rank: int = 0, world_size: int = 1, *, contents: bool = True, moments: bool = True
) -> list[str]:
    """Return descriptions of what is wrong with the files of a checkpoint; an empty list if the checkpoint is
    undamaged. This rank checks every world_size-th file. Without `contents`, only the sizes of files are compared, and
    no hashes. Without `moments`, the files are left out that only a run that continues reads."""
    try:
        manifest = read_manifest(folder)
        RunState.from_json(manifest["state"], folder)
    except CheckpointError as error:
        return [str(error)]
    found, files = [], manifest["files"]
    names = sorted(name for name in files if moments or not name.startswith(_OF_RUNS))
    if isinstance(folder, UrlPath):
        return [*_problems_in_store(folder, {name: files[name] for name in names[rank::world_size]}, contents)]
    for name in names[rank::world_size]:
        path, expected = folder / name, files[name]
        try:
            if (size := path.stat().st_size) != expected["bytes"]:
                found.append(pointer_at(path) or f"{path} has {size} bytes instead of {expected['bytes']}")
            elif contents and sha256(path) != expected["sha256"]:
                found.append(f"{path} does not match its SHA-256")
            elif not os.access(path, os.R_OK):
                found.append(f"{path} cannot be read (Permission denied)")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as error:
            found.append(f"{path} cannot be read ({error.strerror})")
    return found


def _problems_in_store(folder: UrlPath, files: Mapping[str, Any], contents: bool) -> Iterator[str]:
    try:
        sizes = store_at(folder).sizes()
        for name, expected in files.items():
            if name not in sizes:
                yield f"{folder / name} is missing"
            elif sizes[name] != expected["bytes"]:
                yield f"{folder / name} has {sizes[name]} bytes instead of {expected['bytes']}"
            elif contents and sha256_in_store(folder / name) != expected["sha256"]:
                yield f"{folder / name} does not match its SHA-256"
    except OSError as error:
        yield f"{folder} cannot be read ({error})"


def newest_whole(
    root: Location,
    report: Callable[[str], None],
    wanted: Callable[[int], bool] = lambda step: True,
    *,
    contents: bool = True,
    moments: bool = True,
) -> tuple[Location | None, list[Location]]:
    """Find the newest undamaged checkpoint whose step is wanted; collective. `contents` and `moments` are explained in
    `problems`. Raises CheckpointError if there are checkpoints of wanted steps, but none is undamaged; or the newest
    one was written by a newer SageTrain. An older one is not taken then, because the run would go back.

    Args:
        report: gets a line for each damaged checkpoint that was passed over.
        wanted: returns whether the checkpoint of a step may be chosen.

    Returns:
        The checkpoint, or None without any, and the damaged ones that were passed over.
    """
    damaged: list[Location] = []

    def left() -> Location | None:
        there = [folder for folder in published(root) if wanted(step_of(folder)) and folder not in damaged]
        return max(there, key=step_of, default=None)

    rank, world_size = rank_and_world_size()
    while folder := of_rank_0(left() if rank == 0 else None):
        own = problems(folder, rank, world_size, contents=contents, moments=moments)
        wrong = [problem for found in of_every_rank(own) for problem in found]
        if not wrong:
            return folder, damaged
        if said := of_rank_0(written_by_newer(folder)):
            raise CheckpointError(said)
        # If the folder is gone, the run that owns it continues and has removed it for newer ones.
        if of_rank_0(folder in published(root)):
            damaged.append(folder)
            report(f"checkpoint {folder.name} is damaged and passed over: {'; '.join(wrong)}")
    if damaged:
        raise CheckpointError(
            f"{root}: no checkpoint is whole ({len(damaged)} damaged); restore one, or choose another "
            "training.run_dir to start from the beginning"
        )
    return None, damaged


def whole_at(root: Location, step: int, *, moments: bool = True) -> Location:
    """Return the checkpoint of a step. `moments` is explained in `problems`. Raises CheckpointError if the checkpoint
    is damaged or does not exist."""
    there = published(root)
    folder = next((each for each in there if step_of(each) == step), None)
    if folder is None:
        steps = ", ".join(str(step_of(each)) for each in there) or "none"
        raise CheckpointError(f"{root} has no checkpoint of step {step}; it has steps: {steps}")
    if wrong := problems(folder, moments=moments):
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}")
    return folder


def whole(path: Location, report: Callable[[str], None], *, contents: bool = True, moments: bool = True) -> Location:
    """Return the checkpoint that a path names: the path itself, or the newest undamaged checkpoint of a run folder;
    collective. `contents` and `moments` are explained in `problems`. Raises CheckpointError if there is no undamaged
    checkpoint."""
    if not (path / MANIFEST).is_file():
        folder, _ = newest_whole(path / "checkpoints", report, contents=contents, moments=moments)
        if folder is None:
            raise CheckpointError(f"{path} has no checkpoint")
        return folder
    found = of_every_rank(problems(path, *rank_and_world_size(), contents=contents, moments=moments))
    if wrong := [problem for each in found for problem in each]:
        raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(wrong)}")
    return path


def set_aside(folder: Location) -> None:
    """Rename a damaged checkpoint, so that it is not loaded, counted or overwritten. Rank 0 calls this."""
    if isinstance(folder, UrlPath):
        in_store.set_aside(folder)
        return
    number = 0
    while (target := folder.with_name(f"damaged-{folder.name}{f'-{number}' if number else ''}")).exists():
        number += 1
    os.rename(folder, target)


# -- small parts ---------------------------------------------------------------------------------------------------


def sha256(path: Location) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    if isinstance(path, UrlPath):
        return sha256_in_store(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
