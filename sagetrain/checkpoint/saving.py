"""Write checkpoints while training continues.

Training stands still only while each rank's state is copied to host memory, which is kept from save to save. Then a
thread of every rank writes, syncs and hashes the copy, or sends it to a store (publishing.py). The folder is published
when the files of all ranks are durable.

The threads talk to the thread of rank 0 through a key-value store (cluster/mailbox.py). Each rank has one thread and
saves one checkpoint at a time, so messages have the same order everywhere. If files were the signals, a file system's
cache could delay the news that a rank cannot write; messages arrive at once. on_disk.py describes the content of the
folder.
"""

from __future__ import annotations

import io
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from sagetrain.checkpoint.on_disk import folder_name, prune
from sagetrain.checkpoint.publishing import InStore, OnDisk
from sagetrain.checkpoint.shares import WrittenShare, manifest_of
from sagetrain.checkpoint.state import RunState
from sagetrain.checkpoint.stateful import Owned
from sagetrain.cluster.mailbox import Mailbox
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.errors import CheckpointError, way_to_room
from sagetrain.config.schema import CheckpointConfig
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.storage.url_path import UrlPath

T = TypeVar("T")

_PAUSES = 1.0, 60.0
"""The first and the longest pause in seconds before a checkpoint that could not be written is tried again. Each pause
is twice as long as the one before."""


@dataclass(frozen=True)
class Saved:
    """A published checkpoint: the seconds that training stood still for it, and the seconds from then until it was
    published."""

    step: int
    tokens: int
    stall_seconds: float
    publish_seconds: float


@dataclass(frozen=True)
class _Snapshot:
    """The state of this rank when the save began."""

    step: int
    tokens: int
    state: dict[str, Any]
    """The result of RunState.to_json. It is a copy, because training continues and changes the original."""
    config_text: str
    rng: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]
    """Views of the saver's host memory, by file and by the name in the file."""
    share: WrittenShare


class Saver:
    """The writer of a run's checkpoints, in the background and one at a time. Making one is collective.

    Args:
        settings: which checkpoints are kept, and how long one that cannot be written is tried again.
        timeout: how much longer one rank's files may take than another's.
        alive: called by `wait` from time to time as long as this rank's files make progress.
    """

    def __init__(
        self,
        folder: RunFolder,
        groups: ParallelGroups,
        settings: CheckpointConfig,
        timeout: timedelta,
        alive: Callable[[], None] = lambda: None,
    ):
        self._tolerate = 60 * settings.tolerate_minutes
        self.troubles = deque[tuple[int, int, str]]()
        """The step, the tokens and the error of each checkpoint that could not be written and is tried again. Whoever
        reports them takes them out."""
        self.saved = deque[Saved]()
        """The checkpoints that have been published. Whoever reports them takes them out."""
        self._told_error: CheckpointError | None = None
        self.retries = False
        """This is true while a checkpoint that could not be written is tried again."""
        self._folder, self._root, self._groups, self._alive = folder, folder.checkpoints, groups, alive
        self._keep = settings.keep_last, settings.keep_every_tokens
        self._timeout, self._rank, self._mailbox = timeout, groups.rank, None
        if groups.topology.world_size > 1:
            self._mailbox = Mailbox(timeout)
        root, moved = self._root, self._moved
        self._publisher = InStore(root, moved) if isinstance(root, UrlPath) else OnDisk(root, moved)
        self._memory = torch.empty(0)
        self._unpinned: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._progress = 0
        self._failure: BaseException | None = None
        self.published_step = 0
        """The step of the newest checkpoint that this saver has published; 0: none yet."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether a save has failed on this rank. The other ranks learn of the failure at about the same time, but
        maybe not yet."""
        return self._failure is not None

    def wait_for_an_attempt(self) -> None:
        """Wait until the checkpoint that is being written is published, or could not be written for the first time."""
        self._wait(until_published=False)

    def reserve(self, shards: Iterable[Owned]) -> None:
        """Allocate the host memory for saving `shards`: 4 bytes per value of each kind, 12 per parameter with AdamW.

        With a GPU the memory will be pinned, so its pages must be there. A thread writes to them while the model
        compiles, because some systems hand out new memory at a few GB a second, for all ranks of a host together.
        """
        owned = WrittenShare.of(shards, self._groups).owned
        self._memory = torch.empty(sum(len(shard.kinds) * (shard.stop - shard.start) for shard in owned))
        if _on_gpu(owned):
            self._unpinned = threading.Thread(target=self._memory.zero_, name="reserve", daemon=True)
            self._unpinned.start()

    def pin(self) -> None:
        """Pin the reserved memory if it is for copies from a GPU, and wait for its pages before. Pinning takes a second
        for a few GB, so it is done after the first step and not while a save holds training up."""
        if self._unpinned is None:
            return
        self._unpinned.join()
        self._unpinned = None
        # The memory is registered, because torch's own pinned memory comes in powers of two: up to twice as much.
        cuda: Any = torch.cuda.cudart()
        address = self._memory.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, self._memory.nbytes, 0))
        weakref.finalize(self, cuda.cudaHostUnregister, address).atexit = False

    def start(self, state: RunState, config_text: str, shards: Iterable[Owned], rng: dict[str, Any]) -> None:
        """Save the checkpoint of `state.step`, and return as soon as the state is copied; collective. A checkpoint that
        is still being written is waited for first (see `wait`). Earlier checkpoints stay untouched until the new one is
        complete.

        Args:
            config_text: the resolved configuration as YAML.
            shards: the result of Engine.owned() on this rank.
            rng: the random-number state of this rank.
        """
        begin = time.perf_counter()
        self.wait()
        share = WrittenShare.of(shards, self._groups)
        snapshot = _Snapshot(state.step, state.tokens, state.to_json(), config_text, rng, self._copy(share), share)
        stall = time.perf_counter() - begin
        self._thread = threading.Thread(target=self._work, args=(snapshot, stall), name="saver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is published; collective. Raises CheckpointError on every
        rank, if any rank could not write it. A full disk is one cause."""
        self._wait(until_published=True)
        if self._failure:
            raise self._failure

    def _wait(self, until_published: bool) -> None:
        seen = -1
        while self._thread is not None and (until_published or not self.retries):
            if seen != self._progress:
                seen = self._progress
                self._alive()
            self._thread.join(0.5)
            if not self._thread.is_alive():
                self._thread = None

    # -- the copy ------------------------------------------------------------------------------------------------

    def _copy(self, share: WrittenShare) -> dict[str, dict[str, torch.Tensor]]:
        """Copy the state to host memory and return it by file and by the name in the file."""
        if not self._memory.numel():
            self.reserve(share.owned)
        self.pin()
        memory, used = self._memory, 0
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for file, name, shard, kind in share.tensors():
            copy = memory[used : used + shard.stop - shard.start]
            copy.copy_(shard.read(kind).detach(), non_blocking=True)
            tensors.setdefault(file, {})[name] = copy
            used += len(copy)
        assert used == memory.numel(), "what a rank owns does not change in a run"
        if _on_gpu(share.owned):
            # The copies run on training's own stream, behind the update that is saved, and the thread reads them.
            # Training could queue its next step behind them at once, but that would gain nothing, because the GPU
            # begins that step when the copies are done.
            torch.cuda.current_stream().synchronize()
        return tensors

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self, snapshot: _Snapshot, stall: float) -> None:
        begin = time.perf_counter()
        try:
            self._save_or_try_again(snapshot)
        # Whatever the failure is, wait() raises it in the main thread.
        except BaseException as failure:  # noqa: BLE001
            self._failure = failure
        else:
            self.published_step = snapshot.step
            self.saved.append(Saved(snapshot.step, snapshot.tokens, stall, time.perf_counter() - begin))
        finally:
            self.retries = False

    def _save_or_try_again(self, snapshot: _Snapshot) -> None:
        """Save, again and again for the time that is tolerated. All ranks do the same, as rank 0 tells them."""
        (pause, longest), begin = _PAUSES, time.perf_counter()
        while True:
            try:
                self._save(snapshot)
                return
            except CheckpointError as failure:
                # All ranks know of this error alone, and can try again together.
                if failure is not self._told_error or not self._tolerate:
                    raise
                if self._told(lambda: time.perf_counter() - begin >= self._tolerate, "cannot save"):
                    raise
                if not self.retries:
                    self.troubles.append((snapshot.step, snapshot.tokens, str(failure)))
                self.retries = True
            end = time.perf_counter() + pause
            while time.perf_counter() < end:
                time.sleep(min(0.2, pause))
                # Nothing hangs.
                self._progress += 1
            pause = min(2 * pause, longest)

    def _save(self, snapshot: _Snapshot) -> None:
        final = self._root / folder_name(snapshot.step)
        try:
            folder = self._told(lambda: self._begin(final.name), f"cannot create a folder for {final}")
            entry = dict(snapshot.share.entry)
            try:
                entry["files"] = self._write(folder, snapshot)
            except (OSError, SafetensorError) as error:
                entry["error"] = f"rank {self._rank}: {error}"
            entries = self._gathered(entry)
            self._told(lambda: self._publish(folder, snapshot, entries), f"cannot write {final}")
        except BaseException as failure:
            # The unfinished files are removed, because they would leave a full disk full.
            if self._rank == 0:
                with suppress(OSError):
                    self._publisher.discard()
            # The RuntimeError is one of the key-value store.
            if isinstance(failure, RuntimeError) and not isinstance(failure, CheckpointError):
                raise CheckpointError(
                    f"cannot write {final}: another rank is gone, or still writes {self._timeout} after this one"
                    f" ({failure})"
                ) from failure
            raise

    def _begin(self, step_name: str) -> str:
        self._folder.check_owner()
        return self._publisher.begin(step_name)

    def _write(self, folder: str, snapshot: _Snapshot) -> dict[str, dict[str, Any]]:
        """Write this rank's files durably, and return their sizes and SHA-256 by name."""
        # torch.save to a file would report a full disk as a RuntimeError.
        packed = io.BytesIO()
        torch.save(snapshot.rng, packed)
        return self._publisher.write(folder, {f"rng-{self._rank:05d}.pt": packed.getvalue(), **snapshot.tensors})

    def _moved(self) -> None:
        self._progress += 1

    def _publish(self, folder: str, snapshot: _Snapshot, entries: list[dict[str, Any]]) -> None:
        """Publish a checkpoint on rank 0 after all ranks have written, and delete old checkpoints."""
        if errors := [entry["error"] for entry in entries if "error" in entry]:
            raise OSError("; ".join(errors))
        files = {name: info for entry in entries for name, info in entry["files"].items()}
        files |= self._publisher.write(folder, {"config.yaml": snapshot.config_text.encode()})
        manifest = manifest_of(self._groups, snapshot.state, snapshot.share.shapes, entries, files)
        self._publisher.publish(folder, folder_name(snapshot.step), manifest)
        prune(self._root, *self._keep)
        self._folder.send()

    def _told(self, action: Callable[[], T], what: str) -> T:
        """Run `action` on rank 0 and return its result on every rank. Raises CheckpointError on every rank, if `action`
        raised an error."""
        box: list[Any] = [None, None]
        cause = None
        if self._rank == 0:
            try:
                box[0] = action()
            # Whatever the error is, the other ranks wait for an answer.
            except Exception as error:  # noqa: BLE001
                box[1], cause = f"{what}: {error}", error
                if way := way_to_room(box[1]):
                    box[1] += f"; {way} and start the run again"
        if self._mailbox:
            box = self._mailbox.tell(box)
        if box[1]:
            self._told_error = CheckpointError(box[1])
            raise self._told_error from cause
        told: T = box[0]
        return told

    def _gathered(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on the other ranks."""
        return self._mailbox.gather(value) if self._mailbox else [value]


def _on_gpu(owned: list[Owned]) -> bool:
    return bool(owned) and owned[0].read("weight").is_cuda
