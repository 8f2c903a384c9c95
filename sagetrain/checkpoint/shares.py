"""The share of a checkpoint that each rank writes, and the manifest that the shares of all ranks make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sagetrain.checkpoint.manifest import file_name, format_of
from sagetrain.checkpoint.stateful import Owned
from sagetrain.model.placement import place
from sagetrain.parallel.topology import ParallelGroups


@dataclass(frozen=True)
class WrittenShare:
    """The share of a checkpoint that this rank writes."""

    rank: str
    """The name of the rank in the names of its files."""
    owned: list[Owned]
    """The shards that this rank writes. Empty shards are left out, and so are copies that another replica writes, or an
    earlier rank of this one."""
    shapes: dict[str, dict[str, Any]]
    """The manifest's entry of every parameter, without its pieces."""
    entry: dict[str, Any]
    """The place of the rank, its name, and `ranges`: an integer array [parameter, 2] with the two ends of the range
    that it writes of each parameter."""

    @classmethod
    def of(cls, shards: Iterable[Owned], groups: ParallelGroups, shared: bool = False) -> WrittenShare:
        """Return the share of this rank of what Engine.owned() returns. `shared`: the rank also writes what an earlier
        rank of its replica writes."""
        every = list(shards)
        # A rank writes nothing if another replica has all of the same ranges.
        some = [] if all(s.twin for s in every) else every
        owned = [s for s in some if s.stop > s.start and not s.twin and (shared or place(s.spec, groups).counted)]
        shapes = {
            s.name: {"shape": list(s.spec.shape), "tp_dim": s.spec.tensor_dim, "kinds": list(s.kinds)} for s in some
        }
        written = {s.name: (s.start, s.stop) for s in owned}
        ranges = np.array([written.get(name, (0, 0)) for name in shapes], dtype=np.int64).reshape(-1, 2)
        stage = f"pp{groups.pp_rank:02d}-" if groups.pp_size > 1 else ""
        rank = f"{stage}tp{groups.tp_rank:03d}-dp{groups.replica_rank:03d}"
        entry = {"place": (groups.tp_rank, groups.pp_rank, groups.replica_rank), "rank": rank, "ranges": ranges}
        return cls(rank, owned, shapes, entry)

    def tensors(self) -> Iterator[tuple[str, str, Owned, str]]:
        """Yield each tensor that this rank writes: its file, its name there, its shard and its kind."""
        for shard in self.owned:
            for kind in shard.kinds:
                yield file_name(kind, self.rank), f"{shard.name}|{kind}", shard, kind


def manifest_of(
    groups: ParallelGroups,
    state: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, Any]],
    entries: Sequence[Mapping[str, Any]],
    files: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        state: the result of RunState.to_json.
        shapes: see WrittenShare, and so are `entries`, of all ranks.
        files: the bytes and the SHA-256 of each file, by name.
    """
    wrote = sorted((entry for entry in entries if len(entry["ranges"])), key=lambda entry: entry["place"])
    cut = [shape["tp_dim"] is not None for shape in shapes.values()]
    pieces = _runs([entry["place"][0] for entry in wrote], [entry["ranges"] for entry in wrote], cut)
    return {
        "format": format_of(shape["kinds"] for shape in shapes.values()),
        "state": state,
        "layout": {
            "tensor_parallel_size": groups.tp_size,
            "context_parallel_size": groups.cp_size,
            "data_parallel_size": groups.dp_size,
            **({"pipeline_parallel_size": groups.pp_size} if groups.pp_size > 1 else {}),
        },
        "ranks": [entry["rank"] for entry in wrote],
        "tensors": {
            name: {**shape, "pieces": runs} for (name, shape), runs in zip(shapes.items(), pieces, strict=True)
        },
        "files": files,
    }


def _runs(tp_ranks: list[int], ranges: list[np.ndarray], cut: list[bool]) -> Iterator[list[list[int]]]:
    """Yield the pieces of each parameter as runs (see on_disk.py). With a thousand ranks a manifest that lists every
    piece is tens of megabytes long, and training on rank 0 stands still for a second or two while it is made.

    Args:
        tp_ranks: the tensor-parallel ranks of the ranks that wrote.
        ranges: what each rank wrote, an array [parameter, 2].
        cut: whether tensor-parallel ranks have slices of a parameter. Experts are one slice, of which all ranks may
            write parts.
    """
    if not ranges:
        return
    for (starts, stops), sliced in zip(np.stack(ranges).transpose(1, 2, 0), cut, strict=True):
        slices, ranks = np.array(tp_ranks) * sliced, np.flatnonzero(stops > starts)
        begins, lengths, of = starts[ranks], (stops - starts)[ranks], slices[ranks]
        goes_on = (np.diff(ranks) == 1) & (np.diff(of) == 0) & (np.diff(lengths) == 0)
        goes_on &= begins[1:] == begins[:-1] + lengths[:-1]
        edges = [0, *(np.flatnonzero(~goes_on) + 1), len(ranks)] if len(ranks) else []
        yield [[int(of[a]), int(ranks[a]), int(b - a), int(begins[a]), int(lengths[a])] for a, b in pairwise(edges)]
