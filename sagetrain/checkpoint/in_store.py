"""Checkpoints in a store (storage/): where they lie, how they are published, found and deleted.

    checkpoints/
      step-00000040-1a2b3c4d/    a checkpoint: the files that on_disk.py describes, manifest.json last
      step-00000040.published    the name of the folder that is the checkpoint of step 40
      latest                     the name of the newest folder

A store has no renames. So each attempt to write a checkpoint has a folder of its own, whose name no other writer uses.
The file `.published` makes it the checkpoint of its step. It is written last, and only if there is none: of two writers
one is refused. A copy of the folder on a disk, under the name step-00000040, is a checkpoint there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from sagetrain.checkpoint.manifest import MANIFEST
from sagetrain.config.errors import CheckpointError
from sagetrain.storage.url_path import UrlPath, store_at

if TYPE_CHECKING:
    import torch

_FOLDER = re.compile(r"(step-\d+)-[0-9a-f]{8}")
_PUBLISHED = ".published"
LATEST = "latest"


def published(root: UrlPath) -> list[UrlPath]:
    """Return the published checkpoints, oldest first. The one that `latest` names is among them, even if the store does
    not list it yet. Raises CheckpointError if the store cannot be read."""
    store = store_at(root)
    try:
        steps = {name.removesuffix(_PUBLISHED) for name in store.names("step-") if name.endswith(_PUBLISHED)}
        with suppress(FileNotFoundError):
            if named := _FOLDER.fullmatch(store.read(LATEST).decode().strip()):
                steps.add(named[1])
        return [root / folder for step in sorted(steps) if (folder := _folder_of(root, step))]
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error}") from error


def _folder_of(root: UrlPath, step_name: str) -> str:
    """Return the name of the folder that is published for a step; an empty text if there is none."""
    try:
        return store_at(root).read(f"{step_name}{_PUBLISHED}").decode().strip()
    except FileNotFoundError:
        return ""


def publish(folder: UrlPath, manifest: bytes) -> None:
    """Make a folder, in which all other files are, the checkpoint of its step. Raises CheckpointError if another writer
    has published that step."""
    store, name = store_at(folder.parent), f"{folder.name}\n".encode()
    store.put(f"{folder.name}/{MANIFEST}", manifest)
    step_name = folder.name.rpartition("-")[0]
    try:
        store.put(f"{step_name}{_PUBLISHED}", name, absent=True)
        try:
            store.swap(LATEST, name, store.tagged(LATEST)[1])
        except FileNotFoundError:
            store.put(LATEST, name, absent=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"another run saves its checkpoints there ({error}); give each run a training.run_url of its own"
        ) from error


def remove(folder: UrlPath) -> None:
    """Delete a checkpoint in such a way that an interrupted deletion never looks like a checkpoint."""
    store, step_name = store_at(folder.parent), folder.name.rpartition("-")[0]
    if _folder_of(folder.parent, step_name) == folder.name:
        store.delete([f"{step_name}{_PUBLISHED}"])
    store.delete(store.names(f"{folder.name}/"))


def discard_unfinished(root: UrlPath) -> None:
    """Delete the folders that no writer has published, and unfinished files. Only the one run that writes there may
    call this."""
    store = store_at(root)
    store.discard_unfinished()
    names = store.names()
    kept = {store.read(name).decode().strip() for name in names if name.startswith("damaged-")}
    for folder in {name.partition("/")[0] for name in names if "/" in name} - kept:
        step = _FOLDER.fullmatch(folder)
        # The step is asked for by its name, because a store may list late.
        if step and _folder_of(root, step[1]) != folder:
            store.delete(name for name in names if name.startswith(f"{folder}/"))


def set_aside(folder: UrlPath) -> None:
    """Take a damaged checkpoint out of the published ones. Its files stay, under their names."""
    store = store_at(folder.parent)
    store.put(f"damaged-{folder.name}", f"{folder.name}\n".encode())
    store.delete([f"{folder.name.rpartition('-')[0]}{_PUBLISHED}"])


def blocks_of(content: bytes | Mapping[str, torch.Tensor]) -> tuple[Iterator[memoryview], int]:
    """Return a file as blocks, and its bytes. `content` is its bytes, or the fp32 tensors of a safetensors file. The
    blocks are views of the tensors' memory, which safetensors' own function would copy. The file is the same to the
    byte."""
    if isinstance(content, bytes):
        return iter([memoryview(content)]), len(content)
    header, end = header_of({name: values.numel() for name, values in content.items()})
    tensors = (content[name].numpy().data.cast("B") for name in sorted(content))
    return chain([memoryview(header)], tensors), len(header) + end


def header_of(sizes: Mapping[str, int]) -> tuple[bytes, int]:
    """Return the header of a safetensors file with fp32 vectors, of which `sizes` has the numbers of values, and the
    bytes of the vectors. These follow in the order of their names."""
    entries, end = {}, 0
    for name in sorted(sizes):
        begin, end = end, end + 4 * sizes[name]
        entries[name] = {"dtype": "F32", "shape": [sizes[name]], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end
