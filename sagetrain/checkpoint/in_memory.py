"""Copies of a run's state in memory that outlives its processes (checkpoint.in_memory_every).

    /dev/shm/sagetrain-<user>-<run>/
      copy-0-of-rank-3/        a copy of what rank 3 keeps: its files of a checkpoint (on_disk.py), and copy.json
      copy-1-of-rank-3/        the copy before, or after
      held-0-of-rank-1/        the same of a rank on another host, which that rank has sent here

After a step a thread of each rank copies its share of the state into one of its two folders, in turn. It hashes the
copy, writes copy.json last, and sends all of it to a rank of another host. A copy without copy.json, or with another
hash, is none, so a rank may be killed at any time. All ranks copy the same steps: a step is left out if the thread of
any rank is still busy. So there is always a step of which every rank's copy is whole, here and on the other host.

New ranks with the same layout take the newest step of which all copies are whole, if no checkpoint is as new. A copy is
found on whatever host it is, because ranks have other numbers after a host was left out. A folder with a manifest
beside the copy is a checkpoint of which a host has the files that its rank reads.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.checkpoint import slots
from sagetrain.checkpoint.in_store import header_of
from sagetrain.checkpoint.manifest import write_manifest
from sagetrain.checkpoint.shares import WrittenShare, manifest_of
from sagetrain.checkpoint.slots import CopyFolder, Header
from sagetrain.checkpoint.state import RunState
from sagetrain.checkpoint.stateful import Owned
from sagetrain.cluster.rendezvous import listen
from sagetrain.config.errors import ConfigError
from sagetrain.parallel.digest import digest_by, file_sums, mixed, word_sum
from sagetrain.parallel.host import cores_of_rank, ranks_of_host
from sagetrain.parallel.objects import of_every_rank, of_rank_0
from sagetrain.parallel.topology import ParallelGroups

_PATIENCE = 60.0  # seconds for which a message to another host may stand still
_MOST_THREADS = 8
_DONE = b"k"


class CopiesInMemory:
    """The copies of this rank, and those that it holds for a rank of another host. Making them is collective.

    Args:
        run: the identity of the run, which no other run has.
        layout: the settings that decide what each rank keeps. Copies of another layout are not used.
        every: the value of checkpoint.in_memory_every.
    """

    def __init__(
        self, run: str, groups: ParallelGroups, layout: Mapping[str, Any], every: int, say: Callable[[str], None]
    ) -> None:
        self._run, self._groups, self._every, self._say = run, groups, every, say
        self._rank, ranks = groups.rank, groups.topology.world_size
        self._layout = {**layout, "ranks": ranks}
        self._folder = slots.folder_of(run)
        self._lock = slots.locked(self._folder)
        self._host = socket.gethostname(), self._folder.stat().st_ino
        self._given: dict[tuple[int, int], CopyFolder] = {}
        local: int = max(of_every_rank(ranks_of_host() or ranks))
        # A host has at most `local` ranks, so this rank is on another one.
        away = local if 2 * local <= ranks else 0
        self._holder, self._source = (self._rank + away) % ranks, (self._rank - away) % ranks
        numbers = (0, 1)
        self._own = [CopyFolder(self._folder / f"copy-{number}-of-rank-{self._rank}") for number in numbers]
        held = numbers if away else ()
        self._held = [CopyFolder(self._folder / f"held-{number}-of-rank-{self._source}") for number in held]
        self._next, self._share, self._told = 0, WrittenShare("", [], {}, {}), False
        self._idle = threading.Event()
        self._idle.set()
        self._began, self._takes = 0.0, math.inf
        self._stream: torch.cuda.Stream | None = None
        self._pinned: list[weakref.finalize[..., Any]] = []
        self._copied: Future[torch.cuda.Event | None] | None = None
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish, name="copies", daemon=True)
        # The other cores are for the threads that train and read data. Each thread uses as many of torch's.
        self._threads = max(1, min(_MOST_THREADS, cores_of_rank() // 2) // torch.get_num_threads())
        self._peer: socket.socket | None = None
        self._addresses: list[tuple[str, int]] = []
        if away:
            self._listener = listen(0)
            self._addresses = of_every_rank((_address(self._rank < local), self._listener.getsockname()[1]))
            threading.Thread(target=self._serve, name="copies held", daemon=True).start()

    # -- at the start -----------------------------------------------------------------------------------------------

    def newest(self, on_disk: int, known: int) -> Path | None:
        """Return a folder with a checkpoint of the newest step of which all copies are whole; collective. None: no such
        step is newer than the newest whole checkpoint. All other copies are given up.

        Args:
            on_disk: the step of the newest whole checkpoint; 0: there is none.
            known: the step of the newest checkpoint, whole or not. Copies that were taken after a later one belong to
                a run whose checkpoints somebody has removed.
        """
        here = self._here(on_disk, known)
        there, chosen = of_every_rank((self._host, [*here])), None
        for step in sorted({step for _, copies in there for _, step in copies}, reverse=True):
            givers = self._givers(step, here, there)
            if len(givers) == len(there):
                got = self._take_over(here, givers[self._rank], step)
                chosen = step if all(of_every_rank(got)) else None
                break
        for slot in (*self._own, *self._held):
            if (header := slot.header()) and header["step"] != chosen:
                slot.clear()
        used = of_every_rank((self._host, [slot.folder.name for slot in (*self._own, *self._held)]))
        names = {name for host, each in used for name in each if host == self._host}
        # The ranks that had these copies are on other hosts now.
        for folder in self._folder.glob("*-of-rank-*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
        self._given = {}
        return None if chosen is None else self._as_checkpoint(chosen)

    def _here(self, on_disk: int, known: int) -> dict[tuple[int, int], CopyFolder]:
        """Return the copies on this host that the run may continue from, by rank and step."""
        found = {}
        # The name of a rank's own copy comes first, and is taken last.
        for folder in sorted(self._folder.glob("*-of-rank-*"), reverse=True):
            slot, rank = CopyFolder(folder), int(folder.name.rpartition("-")[2])
            if (
                (header := slot.header())
                and (header["run"], header["layout"]) == (self._run, self._layout)
                and on_disk < header["step"]
                and header["published"] <= known
            ):
                found[rank, header["step"]] = slot
        self._given = found
        return found

    def _givers(
        self, step: int, here: Mapping[tuple[int, int], CopyFolder], there: list[tuple[Any, list[tuple[int, int]]]]
    ) -> dict[int, int]:
        """Return the rank that has a whole copy of each rank's share at a step; collective. A rank's own host comes
        first. A rank of which there is no whole copy is not in the dict."""
        options: list[list[int]] = []
        for rank, (host, _) in enumerate(there):
            having = {h: giver for giver, (h, copies) in [*enumerate(there)][::-1] if (rank, step) in copies}
            own = [rank] if having.pop(host, None) is not None else []
            options.append([*own, *(having.values() if self._addresses else ())])
        givers: dict[int, int] = {}
        for turn in range(max(map(len, options))):
            asked = {rank: each[turn] for rank, each in enumerate(options) if rank not in givers and turn < len(each)}
            own = [
                rank for rank, giver in asked.items() if giver == self._rank and here[rank, step].whole(self._threads)
            ]
            givers |= {rank: asked[rank] for whole in of_every_rank(own) for rank in whole}
        return givers

    def _take_over(self, here: Mapping[tuple[int, int], CopyFolder], giver: int, step: int) -> bool:
        """Have the copy of this rank among its own. Return whether it is whole."""
        if giver != self._rank:
            return self._fetch(giver, step)
        folder = here[self._rank, step].folder
        if folder not in [slot.folder for slot in self._own]:
            shutil.rmtree(self._own[0].folder, ignore_errors=True)
            folder.rename(self._own[0].folder)
        return True

    def _fetch(self, giver: int, step: int) -> bool:
        """Get the copy of this rank from a rank of another host. Return whether it is whole."""
        with suppress(OSError, ValueError), socket.create_connection(self._addresses[giver], _PATIENCE) as stream:
            stream.sendall(json.dumps({"run": self._run, "asks": [self._rank, step]}).encode() + b"\n")
            with stream.makefile("rb") as reader:
                slots.receive(reader, json.loads(reader.readline()), self._own[0])
                return self._own[0].whole(self._threads)
        return False

    def _as_checkpoint(self, step: int) -> Path:
        """Write beside this rank's copy what makes it a checkpoint, and return the folder; collective."""
        number = next(n for n, slot in enumerate(self._own) if (h := slot.header()) and h["step"] == step)
        folder, header = self._own[number].folder, self._own[number].header() or {}
        self._next = 1 - number
        every = of_every_rank({key: header[key] for key in ("entry", "sizes")})
        first = of_rank_0(header)
        entries = [{**each["entry"], "ranges": np.array(each["entry"]["ranges"]).reshape(-1, 2)} for each in every]
        # This rank reads its own file where an earlier rank of the replica has the same values.
        own = entries[self._rank]
        kept = np.array(own["kept"]).reshape(-1, 2)
        shared = (own["ranges"] != kept).any(1)
        for other in entries:
            if other is not own and len(other["ranges"]) == len(kept):
                other["ranges"][shared & (other["ranges"] == kept).all(1)] = 0
        own["ranges"] = kept
        files = {name: {"bytes": size, "sha256": ""} for each in every for name, size in each["sizes"].items()}
        write_manifest(folder, manifest_of(self._groups, first["state"], first["shapes"], entries, files))
        (folder / "config.yaml").write_text(first["config"])
        return folder

    # -- taking copies ----------------------------------------------------------------------------------------------

    def prepare(self, shards: Iterable[Owned], config_text: str) -> None:
        """Make room for the copies of what Engine.owned() returns; collective. Raises ConfigError if this host has not
        as much memory."""
        every_shard = list(shards)
        self._share, self._config_text = WrittenShare.of(every_shard, self._groups, shared=True), config_text
        written = WrittenShare.of(every_shard, self._groups).entry["ranges"]
        self._ranges = {"ranges": written.tolist(), "kept": self._share.entry["ranges"].tolist()}
        tensors: dict[str, dict[str, int]] = {}
        for file, name, shard, _ in self._share.tensors():
            tensors.setdefault(file, {})[name] = shard.stop - shard.start
        sizes = {file: slots.bytes_of(vectors) for file, vectors in tensors.items()}
        every = of_every_rank(sizes)
        try:
            for slot in self._own:
                slot.allocate(sizes)
            for slot in self._held:
                slot.allocate(every[self._source])
        except OSError as error:
            number = len(self._own) + len(self._held)
            raise ConfigError(
                f"checkpoint.in_memory_every {self._every}: rank {self._rank} on {socket.gethostname()} needs "
                f"{number * sum(sizes.values()) / 2**30:.2f} GiB of {slots.ROOT} for {number} copies "
                f"({error.strerror}): give it more (docker --shm-size, mount -o remount,size=), use more hosts, or "
                "set the key to null"
            ) from error
        self._files = [{name: slots.mapped(own.folder / name, tensors[name]) for name in tensors} for own in self._own]
        self._sources = [_source(shard, kind) for _, _, shard, kind in self._share.tensors()]
        self._targets = [[files[file][1][name] for file, name, *_ in self._share.tensors()] for files in self._files]
        # The place of each vector in its file, for a GPU that hashes what is copied.
        files, names = self._files[0], [*tensors]
        headers = [torch.frombuffer(bytearray(header_of(tensors[file])[0]), dtype=torch.uint8) for file in names]
        self._headers = torch.tensor([int(word_sum(header)) for header in headers], dtype=torch.int64)
        self._places = [
            (names.index(file), (files[file][1][name].data_ptr() - files[file][0].data_ptr()) // 4)
            for file, name, *_ in self._share.tensors()
        ]
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the copy before is not yet whole on both hosts."""
        return not self._idle.is_set()

    def late(self, end: float) -> bool:
        """Whether the copy before is not yet whole at a time of time.monotonic, as far as one knows. A copy on this
        host takes as long as the one before. Nobody knows how long a network takes."""
        return self.busy and self._began + self._takes > end

    def due(self, step: int) -> bool:
        """Whether a copy is to be taken after a step, if no rank is busy."""
        return step % self._every == 0

    @torch.no_grad()
    def take(self, state: RunState, published: int, rng: Mapping[str, Any]) -> None:
        """Begin to copy the state after a step, and the random-number state of this rank. `settle` says when the state
        may change again. `published` is the step of the newest checkpoint; 0: there is none. Where `late` has promised
        too much, this waits for the copy before."""
        self._idle.wait()
        slot, files, targets = self._own[self._next], self._files[self._next], self._targets[self._next]
        self._next = 1 - self._next
        slot.clear()
        if self._stream is None and any(shard.read("weight").is_cuda for shard in self._share.owned[:1]):
            self._pin()
        updated = torch.cuda.current_stream().record_event() if self._stream else None
        header: Header = {"run": self._run, "layout": self._layout, "step": state.step, "published": published}
        header["entry"] = self._share.entry | self._ranges
        if self._rank == 0:
            header |= {"state": state.to_json(), "config": self._config_text, "shapes": self._share.shapes}
        memory = {file: each for file, (each, _) in files.items()}
        task = _Task(slot, header, memory, targets, dict(rng), updated)
        self._copied, self._began = task.copied, time.monotonic()
        self._idle.clear()
        self._work.put(task)

    def settle(self) -> None:
        """Let the state change no earlier than it is copied. The host waits for the copies of a CPU. Those of a GPU are
        waited for by the GPU."""
        if self._copied and (copied := self._copied.result()):
            torch.cuda.current_stream().wait_event(copied)
        self._copied = None

    def _pin(self) -> None:
        """Pin the memory of the copies, so that copies from the GPU run beside its work."""
        self._stream, cuda = torch.cuda.Stream(), torch.cuda.cudart()
        for memory in [memory for files in self._files for memory, _ in files.values()]:
            torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            self._pinned.append(weakref.finalize(self, cuda.cudaHostUnregister, memory.data_ptr()))
            self._pinned[-1].atexit = False

    def end(self) -> None:
        """Remove all copies, because a checkpoint has the state of the run; collective."""
        self._work.put(None)
        self._thread.join()
        dist.barrier()
        if self._addresses:
            # A closed socket alone would leave the thread in its wait.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._peer:
            self._peer.close()
        for unpin in self._pinned:
            unpin()
        self._files, self._targets = [], []
        for slot in (*self._own, *self._held):
            shutil.rmtree(slot.folder, ignore_errors=True)
        self._lock.close()
        slots.remove_if_left(self._folder)

    # -- the threads ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Make, hash and send one copy after another."""
        while task := self._work.get():
            try:
                self._complete(task)
            # Training goes on without copies, whatever is wrong with them.
            except Exception as error:  # noqa: BLE001
                self._say_once(f"cannot be kept ({error})")
            self._idle.set()

    @torch.no_grad()
    def _begin(self, task: _Task) -> tuple[torch.cuda.Event, Tensor] | None:
        """Copy the state. A GPU's copies are only launched: return the event behind them, and the sums of the hashes,
        which the GPU makes as well. The launches take the host some milliseconds, in which the thread that trains
        launches the next step."""
        if self._stream:
            # A thread begins at GPU 0, to which the end of the block would return: all ranks would take memory there.
            torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            if self._stream and task.updated:
                self._stream.wait_event(task.updated)
            sources = [source if isinstance(source, Tensor) else source() for source in self._sources]
            # A loop over hundreds of tensors would take three times as long.
            if sources:
                torch._foreach_copy_(task.targets, sources, non_blocking=True)
            if not self._stream:
                return None
            sums = file_sums(sources, self._places, len(task.memory)).to("cpu", non_blocking=True)
            # The event wakes this thread, which must not wait busily.
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        return copied, sums

    def _complete(self, task: _Task) -> None:
        try:
            begun = self._begin(task)
        except Exception:
            task.copied.set_result(None)
            raise
        task.copied.set_result(begun and begun[0])
        rng = f"rng-{self._rank:05d}.pt"
        torch.save(task.rng, task.slot.folder / rng)
        if begun:
            copied, sums = begun
            copied.synchronize()
            hashes = dict(zip(task.memory, mixed(self._headers + sums).tolist(), strict=True))
        else:
            hashes = {name: int(digest_by(self._threads, memory)) for name, memory in task.memory.items()}
        header = task.header | {"hashes": hashes | {rng: task.slot.hash(rng, 1)}}
        header["sizes"] = {name: (task.slot.folder / name).stat().st_size for name in header["hashes"]}
        task.slot.publish(header)
        if not self._addresses:
            self._takes = time.monotonic() - self._began
            return
        try:
            if self._peer is None:
                self._peer = socket.create_connection(self._addresses[self._holder], _PATIENCE)
            slots.send(self._peer, task.slot, header)
            if self._peer.recv(1) != _DONE:
                raise ConnectionResetError("the other side has closed the connection")
        # The run has ended, or is about to.
        except (ConnectionResetError, BrokenPipeError):
            self._peer = None
        except OSError as error:
            self._peer = None
            self._say_once(f"are kept on this host alone, because rank {self._holder} does not take them ({error})")

    def _say_once(self, what: str) -> None:
        """Say once what is wrong with the copies of this rank."""
        if not self._told:
            self._told = True
            self._say(f"checkpoint.in_memory_every: the copies of rank {self._rank} {what}")

    def _serve(self) -> None:
        with suppress(OSError):  # `end` has closed the listener.
            while True:
                stream, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(stream,), name="copies held", daemon=True).start()

    def _answer(self, stream: socket.socket) -> None:
        """Take copies from another rank, or give it the one that it asks for. What is broken off is no copy."""
        with stream, suppress(OSError, ValueError, KeyError), stream.makefile("rb") as reader:
            while (message := json.loads(reader.readline()))["run"] == self._run:
                if (asked := message.get("asks")) is None:
                    older = min(self._held, key=lambda slot: (slot.header() or {"step": -1})["step"])
                    slots.receive(reader, message, older)
                    stream.sendall(_DONE)
                else:
                    slot = self._given[tuple(asked)]
                    slots.send(stream, slot, slot.header() or {})


@dataclass(frozen=True)
class _Task:
    """A copy that was begun."""

    slot: CopyFolder
    header: Header
    memory: dict[str, Tensor]
    """The bytes of the files, by name."""
    targets: list[Tensor]
    """The vectors of the files to which the state is copied."""
    rng: dict[str, Any]
    updated: torch.cuda.Event | None
    """The event behind the update that made the state, on a GPU."""
    copied: Future[torch.cuda.Event | None] = field(default_factory=Future)
    """Done when the state of a CPU is copied, or the copies of a GPU are launched. It has the event behind these."""


def _source(shard: Owned, kind: str) -> Tensor | Callable[[], Tensor]:
    """Return the memory of the values of a kind, or a function that returns them if they are in no fp32 memory. It is
    looked up once, because a copy of hundreds of tensors would keep the host busy."""
    first, second = (shard.read(kind).detach() for _ in range(2))
    return first if first.data_ptr() == second.data_ptr() else partial(shard.read, kind)


def _address(with_rank_0: bool) -> str:
    """Return the address at which other hosts reach this one: that of rank 0's host, or the one that leads there."""
    address = os.environ["MASTER_ADDR"]
    if with_rank_0:
        return address
    family, kind, *_, there = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
