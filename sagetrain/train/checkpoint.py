"""Checkpoints: one folder per step, complete or absent, readable at any layout, and never a program.

    checkpoints/
      step-00000040/
        manifest.json                    what is here: every tensor by name with its global shape and where each piece
                                         lies, every file with size and SHA-256, and the training state
        shard-tp000-dp000.safetensors    fp32 pieces "<parameter>|weight", "|exp_avg", "|exp_avg_sq", each 1-D
        config.yaml                      the resolved configuration of the run
        rng-00000.pt                     random-number state of one rank (loaded with weights_only)
      latest                             name of the newest folder (for people; loading looks at the folders themselves)

A piece is the range [start, stop) of the flattened tensor-parallel slice (tp_rank of tp_size along tp_dim) of a
parameter; `dp` in a file's name counts replicas, context-parallel ones included. A checkpoint is written into a folder
with a temporary name, synced to disk, and renamed once its manifest is in it, so a folder without a manifest, or with
files that do not match it, is never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sagetrain.parallel.topology import ParallelGroups

FORMAT = 1
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used; the message names the folder and the way out."""


def folder_name(step: int) -> str:
    """Name of the folder of one step."""
    return f"step-{step:08d}"


# -- writing -------------------------------------------------------------------------------------------------------


def save(
    root: Path, state: dict[str, Any], config_text: str, shards: Iterable, rng: dict[str, Any], groups: ParallelGroups
) -> None:
    """Write checkpoint `state["step"]` under `root`; collective. `shards` are Engine.shards() of this rank, or empty.

    Raises CheckpointError on every rank if any rank failed (disk full, say); what was there before stays untouched.
    """
    rank, final = _rank(), root / folder_name(state["step"])
    temporary = root / f".writing-{final.name}"
    written: dict[str, Any] = {}

    def publish(every: list[dict]) -> None:
        _write_text(temporary / "config.yaml", config_text)
        files = {name: info for entry in every for name, info in entry["files"].items()}
        manifest = {
            "format": FORMAT,
            "state": state,
            "layout": {
                "tensor_parallel_size": groups.tp_size,
                "context_parallel_size": groups.cp_size,
                "data_parallel_size": groups.dp_size,
            },
            "tensors": _merge_tensors(entry["tensors"] for entry in every),
            "files": {**files, "config.yaml": _file_entry(temporary / "config.yaml")},
        }
        _write_text(temporary / "manifest.json", json.dumps(manifest, indent=1))
        _sync(temporary)
        if final.exists():  # the same step saved twice, after a resume that walked back past a damaged folder
            _remove(final)
        os.rename(temporary, final)
        _write_text(root / "latest.tmp", final.name + "\n")
        os.replace(root / "latest.tmp", root / "latest")
        _sync(root)

    try:
        _together(rank == 0, lambda: _fresh_folder(temporary), f"cannot create {temporary}")
        _together(True, lambda: written.update(_write_rank(temporary, shards, rng, groups)), f"cannot write {final}")
        every = _gather(written)
        _together(rank == 0, lambda: publish(every), f"cannot publish {final}")
    except CheckpointError:
        if rank == 0:  # a disk that was full is not left full
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fresh_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(".writing-*"):  # left behind by a run that was killed while saving
        shutil.rmtree(stale)
    folder.mkdir()


def _write_rank(folder: Path, shards: Iterable, rng: dict[str, Any], groups: ParallelGroups) -> dict:
    file = f"shard-tp{groups.tp_rank:03d}-dp{groups.replica_rank:03d}.safetensors"
    tensors, index = {}, {}
    for shard in shards:
        if shard.stop <= shard.start or (shard.tp_dim is None and groups.tp_rank > 0):
            continue  # nothing owned here, or a replica that tensor-parallel rank 0 writes
        for kind in KINDS:
            tensors[f"{shard.name}|{kind}"] = shard.tensors[kind].detach().to("cpu", copy=True)
        piece = {"file": file, "tp_rank": groups.tp_rank, "start": shard.start, "stop": shard.stop}
        index[shard.name] = {"shape": list(shard.global_shape), "tp_dim": shard.tp_dim, "pieces": [piece]}
    written = [f"rng-{_rank():05d}.pt"]
    packed = io.BytesIO()  # torch.save itself would report a full disk as a RuntimeError
    torch.save(rng, packed)
    (folder / written[0]).write_bytes(packed.getbuffer())
    if tensors:
        written.append(file)
        save_file(tensors, folder / file)
    for name in written:
        _sync(folder / name)
    return {"tensors": index, "files": {name: _file_entry(folder / name) for name in written}}


def _file_entry(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _merge_tensors(indexes: Iterable[dict]) -> dict:
    merged: dict[str, dict] = {}
    for index in indexes:
        for name, entry in index.items():
            if name in merged:
                merged[name]["pieces"] += entry["pieces"]
            else:
                merged[name] = entry
    return merged


def prune(root: Path, keep_last: int, keep_every_tokens: int | None) -> None:
    """Delete old checkpoints (rank 0 calls it): all but the newest `keep_last`, and but the first one at or past
    each multiple of `keep_every_tokens`. A folder whose manifest cannot be read is left to people."""
    found = []
    for folder in _folders(root):
        with contextlib.suppress(CheckpointError):
            found.append((read_manifest(folder)["state"], folder))
    kept, multiples = {folder for _, folder in found[-keep_last:]}, set()
    for state, folder in found:
        multiple = state["tokens"] // keep_every_tokens if keep_every_tokens else 0
        if multiple and multiple not in multiples:
            multiples.add(multiple)
            kept.add(folder)
    for _, folder in found:
        if folder not in kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that an interrupted deletion never looks like a checkpoint."""
    doomed = folder.with_name(f".writing-{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


# -- finding and checking ------------------------------------------------------------------------------------------


def _folders(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(f for f in root.glob("step-*") if (f / "manifest.json").is_file()) if root.is_dir() else []


def read_manifest(folder: Path) -> dict:
    """The manifest of one checkpoint. Raises CheckpointError if it is unreadable or of another format."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: manifest.json cannot be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(f"{folder}: written in format {found}, this SageTrain reads format {FORMAT}")
    return manifest


def problems(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint; this rank checks every world_size-th file. Empty: whole."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name in sorted(files)[rank::world_size]:
        path, expected = folder / name, files[name]
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif _sha256(path) != expected["sha256"]:
            found.append(f"{path} does not match its SHA-256")
    return found


def newest_whole(root: Path, report: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
    """The newest checkpoint whose files are all as its manifest says, and the damaged ones passed over on the way
    (each goes to `report`); collective. Raises CheckpointError when there are checkpoints but none is whole."""
    candidates, damaged = _broadcast([str(f) for f in _folders(root)]), []
    for folder in map(Path, reversed(candidates)):
        wrong = [p for found in _gather(problems(folder, _rank(), _world_size())) for p in found]
        if not wrong:
            return folder, damaged
        damaged.append(folder)
        report(f"checkpoint {folder.name} is damaged and passed over: {'; '.join(wrong)}")
    if candidates:
        raise CheckpointError(
            f"{root}: none of its {len(candidates)} checkpoints is whole; restore one of them, or choose another "
            "training.run_dir to start from the beginning"
        )
    return None, damaged


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint (rank 0 calls it), so that it is neither loaded, nor counted, nor overwritten."""
    number = 0
    while (target := folder.with_name(f"damaged-{folder.name}{f'-{number}' if number else ''}")).exists():
        number += 1
    os.rename(folder, target)


# -- reading -------------------------------------------------------------------------------------------------------


class Reader:
    """Any slice of any tensor of a checkpoint, whatever layout wrote it. Use as a context manager."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, read_manifest(folder)
        self.tensors, self._open = self.manifest["tensors"], {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def local(
        self, name: str, kind: str, tp_rank: int, tp_size: int, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Range [start, stop) of the flattened slice `tp_rank` of `tp_size` of a tensor: 1-D, fp32, on the CPU."""
        entry, source_size = self._entry(name), self.manifest["layout"]["tensor_parallel_size"]
        dim, shape = entry["tp_dim"], entry["shape"]
        if dim is None or source_size == tp_size:
            local_shape = _local_shape(shape, dim, tp_size)
            stop = torch.Size(local_shape).numel() if stop is None else stop
            return self._range(name, kind, 0 if dim is None else tp_rank, start, stop)
        # Another tensor-parallel size: put together the rows (or columns) that this slice covers.
        width, source_width = shape[dim] // tp_size, shape[dim] // source_size
        first, last = tp_rank * width, (tp_rank + 1) * width
        source_shape, parts = _local_shape(shape, dim, source_size), []
        for source in range(first // source_width, -(-last // source_width)):
            whole = self._range(name, kind, source, 0, torch.Size(source_shape).numel()).view(source_shape)
            offset = source * source_width
            low, high = max(first, offset) - offset, min(last, offset + source_width) - offset
            parts.append(whole.narrow(dim, low, high - low))
        return torch.cat(parts, dim).reshape(-1)[start:stop]

    def _entry(self, name: str) -> dict:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}; it belongs to another model")
        return self.tensors[name]

    def _range(self, name: str, kind: str, tp_rank: int, start: int, stop: int) -> torch.Tensor:
        out, filled = torch.empty(stop - start), 0
        for piece in self._entry(name)["pieces"]:
            low, high = max(start, piece["start"]), min(stop, piece["stop"])
            if piece["tp_rank"] == tp_rank and low < high:
                stored = self._file(piece["file"]).get_slice(f"{name}|{kind}")
                out[low - start : high - start] = stored[low - piece["start"] : high - piece["start"]]
                filled += high - low
        if filled != stop - start:
            raise CheckpointError(f"{self.folder}: {name} has {filled} of the {stop - start} values asked for")
        return out

    def _file(self, name: str):
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read ({error})") from error
        return self._open[name]

    def rng(self, rank: int) -> dict[str, Any] | None:
        """Random-number state of one rank; None if the checkpoint was written by fewer ranks."""
        name = f"rng-{rank:05d}.pt"
        if name not in self.manifest["files"]:
            return None
        try:
            return torch.load(self.folder / name, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.folder / name} cannot be read as data: {error}") from error


def check_shapes(reader: Reader, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model. `shapes`: global shape of every parameter of this model."""
    theirs = {name: tuple(entry["shape"]) for name, entry in reader.tensors.items()}
    wrong = [f"{n}: checkpoint {theirs.get(n)}, model {shapes.get(n)}" for n in sorted({*theirs, *shapes})
             if theirs.get(n) != shapes.get(n)]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"{reader.folder} holds another model; {len(wrong)} tensors differ, first: {'; '.join(wrong[:3])}. "
            "Use the model section it was trained with, or another training.run_dir"
        )


def load_engine(reader: Reader, engine, optimizer_steps: int) -> None:
    """Restore weights and Adam moments of this rank's Engine, tensor by tensor."""
    groups, shards = engine.groups, list(engine.shards())
    check_shapes(reader, {shard.name: shard.global_shape for shard in shards})
    for shard in shards:
        where = (groups.tp_rank, groups.tp_size)
        engine.set_weight(shard, reader.local(shard.name, "weight", *where))
        for kind in ("exp_avg", "exp_avg_sq"):
            if shard.tensors:
                shard.tensors[kind].copy_(reader.local(shard.name, kind, *where, shard.start, shard.stop))
    engine.weights_changed()
    engine.set_optimizer_steps(optimizer_steps)


@torch.no_grad()
def load_weights(reader: Reader, model: nn.Module, groups: ParallelGroups) -> None:
    """Restore the weights of a plain model, for evaluation and generation."""
    check_shapes(reader, {name: tuple(p.global_shape) for name, p in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.copy_(reader.local(name, "weight", groups.tp_rank, groups.tp_size).view(parameter.shape))


# -- small parts ---------------------------------------------------------------------------------------------------


def _local_shape(shape: list[int], dim: int | None, tp_size: int) -> list[int]:
    return [n // tp_size if i == dim else n for i, n in enumerate(shape)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file) -> str:  # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * _world_size()
    dist.all_gather_object(values, value)
    return values


def _broadcast(value: Any) -> Any:
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _together(mine: bool, action: Callable[[], None], what: str) -> None:
    """Run `action` on the ranks where `mine`; if it fails anywhere, every rank raises the same CheckpointError."""
    error = None
    if mine:
        try:
            action()
        except (OSError, SafetensorError) as failure:
            error = str(failure)
    errors = [f"rank {rank}: {e}" for rank, e in enumerate(_gather(error)) if e]
    if errors:
        raise CheckpointError(f"{what}: {'; '.join(errors)}")
