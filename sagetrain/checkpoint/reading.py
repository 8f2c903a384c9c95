"""Read any slice of any tensor of a checkpoint, at the layout that wrote it or another one."""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from typing import Any

import torch

from sagetrain.checkpoint.manifest import KINDS, file_name, read_manifest
from sagetrain.checkpoint.piece_files import PieceFiles
from sagetrain.checkpoint.state import RunState
from sagetrain.checkpoint.stateful import Stateful
from sagetrain.config.errors import CheckpointError, many
from sagetrain.model.placement import place
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.layers import materialize
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.storage.url_path import Location

# This many values are read at a time. It bounds the memory that loading needs beside the state itself.
_BLOCK = 2**20


class Reader:
    """A reader of any slice of any tensor of a checkpoint, whatever layout wrote it. It reads what is asked for, and
    keeps files open until `close`."""

    def __init__(self, folder: Location):
        self.folder, self.manifest = folder, read_manifest(folder)
        self.tensors: dict[str, dict[str, Any]] = self.manifest["tensors"]
        self.world_size = math.prod(self.manifest["layout"].values())

    @cached_property
    def _files(self) -> PieceFiles:
        return PieceFiles(self.folder)

    def close(self) -> None:
        """Close the files that were read. They are opened again when they are needed."""
        self._files.close()

    @cached_property
    def state(self) -> RunState:
        """Return the state of the run that wrote the checkpoint. Raises the CheckpointErrors of RunState.from_json."""
        return RunState.from_json(self.manifest["state"], self.folder)

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the kinds of values that the checkpoint has of a tensor; none if it does not have the tensor."""
        return tuple(self.tensors[name].get("kinds", KINDS)) if name in self.tensors else ()

    def fill(self, out: torch.Tensor, name: str, kind: str, number: int, slices: int, start: int = 0) -> None:
        """Fill a 1-D tensor of any dtype and device with the values from position `start` of the flattened slice
        `number` of `slices`, block by block."""
        for low in range(0, out.numel(), _BLOCK):
            block = out[low : low + _BLOCK]
            block.copy_(self.local(name, kind, number, slices, start + low, start + low + block.numel()))

    def local(
        self, name: str, kind: str, number: int, slices: int, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Return range [start, stop) of the flattened slice `number` of `slices` of a tensor: 1-D, fp32, on the
        CPU."""
        entry, source_size = self._entry(name), self.manifest["layout"]["tensor_parallel_size"]
        dim, shape = entry["tp_dim"], entry["shape"]
        if stop is None:
            stop = math.prod(shape) // (1 if dim is None else slices)
        if dim is None or source_size == slices:
            return self._range(name, kind, 0 if dim is None else number, start, stop)
        # The checkpoint has another tensor-parallel size. Seen as a matrix (with one row, if the tensor is split along
        # its first dimension), every slice of the tensor is a range of columns: `width` columns in this slice,
        # `source_width` columns in a slice on disk.
        columns = math.prod(shape[dim:])
        width, source_width = columns // slices, columns // source_size
        out, filled = torch.empty(stop - start), 0
        for row, rows, column, size in _rectangles(start, stop, width, max(1, _BLOCK // source_width)):
            view = out[filled : filled + rows * size].view(rows, size)
            first, last = number * width + column, number * width + column + size
            for source in range(first // source_width, -(-last // source_width)):
                offset = source * source_width
                low, high = max(first, offset), min(last, offset + source_width)
                begin = row * source_width + low - offset
                end = begin + (rows - 1) * source_width + high - low
                stored = self._range(name, kind, source, begin, end)
                view[:, low - first : high - first] = stored.as_strided((rows, high - low), (source_width, 1))
            filled += rows * size
        return out

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}; it belongs to another model")
        return self.tensors[name]

    def _range(self, name: str, kind: str, tp_rank: int, start: int, stop: int) -> torch.Tensor:
        """Return range [start, stop) of the flattened slice `tp_rank` as it is on disk."""
        out, filled = torch.empty(stop - start), 0
        for file, begin, low, high in self._pieces(name, kind, tp_rank, start, stop):
            try:
                self._files.read(file, f"{name}|{kind}", low - begin, out[low - start : high - start])
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read ({error})") from error
            filled += high - low
        if filled != stop - start:
            raise CheckpointError(f"{self.folder}: {name} has {filled} of the {stop - start} values asked for")
        return out

    def _pieces(self, name: str, kind: str, tp_rank: int, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield the pieces that hold a part of [start, stop): the file, the position where the piece begins, and the
        two ends of the part."""
        for piece in self._entry(name)["pieces"]:
            if isinstance(piece, dict):
                low, high = max(start, piece["start"]), min(stop, piece["stop"])
                if piece["tp_rank"] == tp_rank and low < high:
                    yield piece["file"], piece["start"], low, high
                continue
            of, rank, count, first, length = piece
            low, high = max(start, first), min(stop, first + count * length)
            if of != tp_rank or low >= high:
                continue
            for i in range((low - first) // length, (high - 1 - first) // length + 1):
                begin = first + i * length
                file = file_name(kind, self.manifest["ranks"][rank + i])
                yield file, begin, max(low, begin), min(high, begin + length)

    def rng(self, rank: int) -> dict[str, Any] | None:
        """Return the random-number state of one rank; None if the checkpoint was written by fewer ranks."""
        name = f"rng-{rank:05d}.pt"
        if name not in self.manifest["files"]:
            return None
        try:
            state: dict[str, Any] = torch.load(io.BytesIO((self.folder / name).read_bytes()), weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.folder / name} cannot be read as data: {error}") from error
        return state


def _rectangles(start: int, stop: int, width: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the range [start, stop) of a flattened matrix with rows of `width` into rectangles of up to `most` rows.
    Yield (first row, rows, first column, columns)."""
    while start < stop:
        row, column = divmod(start, width)
        whole = 0 if column else min((stop - start) // width, most)
        rows, columns = (whole, width) if whole else (1, min(width - column, stop - start))
        yield row, rows, column, columns
        start += rows * columns


def check_shapes(reader: Reader, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint fits a model with these global shapes of parameters. Raises CheckpointError if it is of
    another model."""
    theirs = {name: tuple(entry["shape"]) for name, entry in reader.tensors.items()}
    wrong = [f"{n}: checkpoint {theirs.get(n)}, model {shapes.get(n)}" for n in sorted({*theirs, *shapes})
             if theirs.get(n) != shapes.get(n)]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"{reader.folder} holds another model, different in {many(len(wrong), 'tensor')}, first: "
            f"{'; '.join(wrong[:3])}. Use the model section it was trained with, or another training.run_dir"
        )


@torch.no_grad()
def load_engine(reader: Reader, engine: Stateful, optimizer_steps: int, *, moments: bool = True) -> None:
    """Restore the weights of an engine and the state of its optimizer, block by block; collective. A rank reads only
    what it owns, so all ranks together read the checkpoint once, however many replicas there are.

    Args:
        optimizer_steps: the number of updates that the state has seen; 0 if `moments` is False.
        moments: read the optimizer's state. If False, the state is set to zero.
    """
    every = list(engine.owned())
    check_shapes(reader, {kept.name: kept.spec.shape for kept in every})
    with closing(reader):
        for kept in every:
            number, slices, *_ = place(kept.spec, engine.groups)
            for kind, low in itertools.product(kept.kinds, range(kept.start, 0 if kept.twin else kept.stop, _BLOCK)):
                high = min(low + _BLOCK, kept.stop)
                known = moments or kind == "weight"
                values = reader.local(kept.name, kind, number, slices, low, high) if known else torch.zeros(high - low)
                kept.write(kind, values, low - kept.start)
    engine.state_changed(optimizer_steps)


@torch.no_grad()
def load_weights(reader: Reader, model: Transformer, groups: ParallelGroups, device: torch.device) -> None:
    """Load the weights of a checkpoint into a model whose parameters are on the meta device, for evaluation and
    generation."""
    check_shapes(reader, {name: spec.shape for name, spec in model.specs.items()})
    with closing(reader):
        for name, parameter in model.named_parameters():
            values = torch.empty_like(parameter, device=device)
            number, slices, *_ = place(model.specs[name], groups)
            reader.fill(values.view(-1), name, "weight", number, slices)
            materialize(parameter, values)
