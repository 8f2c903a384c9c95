"""The two ways in which a checkpoint gets to its place: into a folder on a disk, and into a store."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sagetrain.checkpoint import in_store
from sagetrain.checkpoint.manifest import MANIFEST, write_manifest
from sagetrain.checkpoint.manifest import packed as packed_manifest
from sagetrain.checkpoint.on_disk import remove, sha256
from sagetrain.storage.local import sync
from sagetrain.storage.url_path import UrlPath, store_at

Contents = Mapping[str, bytes | dict[str, torch.Tensor]]
"""Files by name: their bytes, or the tensors of a safetensors file."""
_SLICE = 8 << 20
"""The bytes of a file that are hashed and handed on at once."""


class OnDisk:
    """The publisher on a disk. Files are synced, and a rename publishes them. Every call may raise OSError.

    Args:
        moved: called whenever another part has been written.
    """

    def __init__(self, root: Path, moved: Callable[[], None]) -> None:
        self._root, self._moved = root, moved

    def begin(self, step_name: str) -> str:
        """Clear away unfinished checkpoints, and return the name of a new folder. Its name is never used again, because
        a process that is left of a killed run may still write to the earlier one."""
        self._root.mkdir(parents=True, exist_ok=True)
        self.discard()
        name = f".writing-{step_name}-{uuid.uuid4().hex[:8]}"
        (self._root / name).mkdir()
        return name

    def write(self, folder: str, contents: Contents) -> dict[str, dict[str, Any]]:
        """Write files durably, and return the manifest's entries of them, by name."""
        mode = None
        for name, content in contents.items():
            path = self._root / folder / name
            if isinstance(content, bytes):
                path.write_bytes(content)
                mode = path.stat().st_mode & 0o777
                continue
            save_file(content, path)
            # safetensors makes files that only their owner can read, but the umask should decide who can.
            if mode is not None:
                path.chmod(mode)
        return {name: self._durable(self._root / folder / name) for name in contents}

    def publish(self, folder: str, step_name: str, manifest: dict[str, Any]) -> None:
        """Write the manifest, and make the folder the checkpoint of its step."""
        temporary, final = self._root / folder, self._root / step_name
        write_manifest(temporary, manifest)
        self._sync(temporary / MANIFEST)
        self._sync(temporary)
        # This folder has no manifest, because a damaged checkpoint was set aside before the run reached this step
        # again.
        if final.exists():
            remove(final)
        os.rename(temporary, final)
        latest = self._root / "latest.tmp"
        latest.write_text(final.name + "\n")
        self._sync(latest)
        os.replace(latest, self._root / "latest")
        self._sync(self._root)

    def discard(self) -> None:
        """Delete unfinished checkpoints."""
        for folder in self._root.glob(".writing-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _durable(self, path: Path) -> dict[str, Any]:
        """Sync a file to disk and return its entry in the manifest."""
        self._sync(path)
        self._moved()
        return {"bytes": path.stat().st_size, "sha256": sha256(path)}

    def _sync(self, path: Path) -> None:
        self._moved()
        sync(path)


class InStore:
    """The publisher in a store (in_store.py), with the methods of OnDisk. Files go there from the saver's memory, and
    nothing is kept on a disk."""

    def __init__(self, root: UrlPath, moved: Callable[[], None]) -> None:
        self._root, self._moved = root, moved

    def begin(self, step_name: str) -> str:
        self.discard()
        return f"{step_name}-{uuid.uuid4().hex[:8]}"

    def write(self, folder: str, contents: Contents) -> dict[str, dict[str, Any]]:
        entries, store = {}, store_at(self._root / folder)
        for name, content in contents.items():
            blocks, size = in_store.blocks_of(content)
            digest = hashlib.sha256()
            store.write(name, self._hashed(blocks, digest), size)
            entries[name] = {"bytes": size, "sha256": digest.hexdigest()}
            self._moved()
        return entries

    def publish(self, folder: str, step_name: str, manifest: dict[str, Any]) -> None:
        in_store.publish(self._root / folder, packed_manifest(manifest))

    def discard(self) -> None:
        in_store.discard_unfinished(self._root)

    def _hashed(self, blocks: Iterable[memoryview], digest: Any) -> Iterator[memoryview]:
        for block in blocks:
            for low in range(0, len(block), _SLICE):
                part = block[low : low + _SLICE]
                digest.update(part)
                yield part
                self._moved()
