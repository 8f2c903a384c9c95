"""The manifest of a checkpoint, manifest.json: what is in the folder, and where each piece of each tensor lies.

A piece is the range [start, stop) of the flattened tensor-parallel slice (tp_rank of tp_size along tp_dim) of a
parameter. `dp` in a file's name counts replicas, context-parallel ones included. Consecutive ranks mostly hold
consecutive pieces of one length, so the manifest lists runs of pieces: [tp_rank, rank, count, start, length]. This
keeps its size below ranks times tensors. `rank` is the index in "ranks" of the rank that wrote the first piece. Each
further piece belongs to the next rank and begins where the piece before ends.

A piece may also be an object {file, tp_rank, start, stop}. Its file holds every kind of tensor that the piece has.
Format 1 had only such pieces, with weights and moments in one file, and can still be read. `sagetrain import` writes
such pieces with weights alone, in the dtype of the imported folder.

"kinds" of a tensor says which kinds of values its pieces have. Without it these are KINDS. Format 3 is format 2 where
some tensor has other kinds, so that versions which know AdamW alone refuse it.

"sha256", the last key, is the hash of the text before it. Manifests of earlier versions lack the key: they are read,
and changes that leave them consistent are not seen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter

from sagetrain.checkpoint.state import newer_state, validated
from sagetrain.config.errors import CheckpointError, pointer_at
from sagetrain.storage.url_path import Location

MANIFEST = "manifest.json"
FORMAT = 2
_OTHER_KINDS, _READ = 3, (1, 2, 3)
KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""The kinds of values that AdamW has of a tensor."""
_HASH = "sha256"
_WAY_OUT = "restore that checkpoint, or use another one"

# -- what every manifest has ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """The keys that the state of every run has, and of every import."""

    step: int
    tokens: int


@dataclass(frozen=True)
class _Layout:
    tensor_parallel_size: PositiveInt
    context_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1


@dataclass(frozen=True)
class _Piece:
    file: str
    tp_rank: NonNegativeInt
    start: NonNegativeInt
    stop: PositiveInt


_Run = tuple[NonNegativeInt, NonNegativeInt, PositiveInt, NonNegativeInt, PositiveInt]


@dataclass(frozen=True)
class _Tensor:
    shape: list[PositiveInt]
    tp_dim: NonNegativeInt | None
    pieces: list[_Run | _Piece]
    kinds: tuple[str, ...] = KINDS


@dataclass(frozen=True)
class _File:
    bytes: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    state: _Position
    layout: _Layout
    tensors: dict[str, _Tensor]
    files: Annotated[dict[str, _File], Field(min_length=1)]
    ranks: list[str] = field(default_factory=list)


_MANIFEST = TypeAdapter(_Manifest)

# -- writing -------------------------------------------------------------------------------------------------------


def file_name(kind: str, rank: str) -> str:
    """Return the name of the file that holds one kind of tensor of a rank. `rank` is the rank's name in "ranks" of the
    manifest."""
    return f"{'shard' if kind == 'weight' else 'moments'}-{rank}.safetensors"


def format_of(kinds: Iterable[Sequence[str]]) -> int:
    """Return the format of a checkpoint whose tensors have these kinds of values."""
    return FORMAT if all(tuple(each) == KINDS for each in kinds) else _OTHER_KINDS


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint, with its hash."""
    (folder / MANIFEST).write_bytes(packed(manifest))


def packed(manifest: dict[str, Any]) -> bytes:
    """Return the manifest of a checkpoint as the bytes of its file, with its hash."""
    return _hashed(json.dumps({key: value for key, value in manifest.items() if key != _HASH}).encode())


def _hashed(text: bytes) -> bytes:
    """Return a JSON object with its hash as the last key."""
    return text[:-1] + f', "{_HASH}": "{hashlib.sha256(text).hexdigest()}"}}'.encode()


# -- reading -------------------------------------------------------------------------------------------------------


def read_manifest(folder: Location) -> dict[str, Any]:
    """Return the manifest of one checkpoint. Raises CheckpointError if the manifest is unreadable, of another format,
    changed since it was written, or not as SageTrain writes it."""
    manifest = _parsed(folder)
    if manifest["format"] not in _READ:
        raise CheckpointError(_other_format(folder, manifest["format"]))
    where = f"{folder}: {MANIFEST}: "
    if wrong := next(_wrong(validated(_MANIFEST, manifest, where)), ""):
        raise CheckpointError(f"{where}{wrong}; {_WAY_OUT}")
    return manifest


def written_by_newer(folder: Location) -> str:
    """Return the message for a checkpoint whose format or state came after this version, which makes it no damaged one;
    an empty text for every other checkpoint."""
    try:
        manifest = _parsed(folder)
    except CheckpointError:
        return ""
    found, state = manifest["format"], manifest.get("state")
    if isinstance(found, int) and found > max(_READ):
        return _other_format(folder, found)
    return newer_state(state, folder) if isinstance(state, dict) else ""


def _parsed(folder: Location) -> dict[str, Any]:
    """Return the keys of a manifest whose hash is right. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest: dict[str, Any] = json.loads(text)
        _ = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"it has no key {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(pointer_at(path) or f"{folder}: {MANIFEST} cannot be read ({said})") from error
    # Earlier versions wrote these keys alone, so another one may be what is left of the hash's key.
    known = {"format", *(each.name for each in fields(_Manifest))}
    if _HASH in manifest or not manifest.keys() <= known:
        before = text.rpartition(f', "{_HASH}": '.encode())[0] + b"}"
        if _hashed(before) != text:
            raise CheckpointError(f"{folder}: {MANIFEST} does not match the SHA-256 in it: it was changed; {_WAY_OUT}")
    return manifest


def _other_format(folder: Location, found: object) -> str:
    return (
        f"{folder}: written in format {found}, this SageTrain reads formats {_READ[0]} to {_READ[-1]}; "
        "use the SageTrain that wrote it, or a newer one"
    )


def _wrong(manifest: _Manifest) -> Iterator[str]:
    """Yield what the parts of a manifest say against one another."""
    for name in manifest.files:
        if name in ("", ".", "..") or {*name} & {*"/\\\0"}:
            yield f"files: {name!r} is not the name of a file in the folder"
    needed: dict[str, str] = {}
    holders: dict[tuple[int, int, tuple[str, ...]], str] = {}
    for name, tensor in manifest.tensors.items():
        slices = manifest.layout.tensor_parallel_size if tensor.tp_dim is not None else 1
        if tensor.tp_dim is not None and (tensor.tp_dim >= len(tensor.shape) or tensor.shape[tensor.tp_dim] % slices):
            yield f"tensors.{name}: dimension {tensor.tp_dim} of shape {tensor.shape} is not cut into {slices} slices"
            return
        ranges: list[tuple[int, int, int]] = []
        for piece in tensor.pieces:
            if isinstance(piece, _Piece):
                needed.setdefault(piece.file, name)
                ranges.append((piece.tp_rank, piece.start, piece.stop))
            else:
                tp_rank, rank, count, start, length = piece
                holders.setdefault((rank, count, tensor.kinds), name)
                ranges.append((tp_rank, start, start + count * length))
        if not _tiled(ranges, slices, math.prod(tensor.shape) // slices):
            yield f"tensors.{name}: its pieces are not {tensor.shape} in {slices} slices, each value once"
    for (rank, count, kinds), name in holders.items():
        if rank + count > len(manifest.ranks):
            yield f"tensors.{name}: its pieces are on ranks {rank} to {rank + count - 1} of {len(manifest.ranks)}"
            return
        for each in manifest.ranks[rank : rank + count]:
            needed.update(dict.fromkeys((file_name(kind, each) for kind in kinds), name))
    for file, name in needed.items():
        if file not in manifest.files:
            yield f"files: lacks {file}, which has pieces of {name}, so nobody can tell whether that file is whole"


def _tiled(ranges: list[tuple[int, int, int]], slices: int, size: int) -> bool:
    """Whether ranges (slice, start, stop) are slices 0 to `slices` - 1 of `size` values, each value once."""
    place, end = 0, 0
    for of, start, stop in sorted(ranges):
        if end == size:
            place, end = place + 1, 0
        if (of, start) != (place, end) or stop <= start:
            return False
        end = stop
    return (place, end) == (slices - 1, size)
