"""Find the tensors of a Hugging Face folder in its safetensors files, in the way that transformers reads them.

A folder may keep a tensor in two places: in model.safetensors beside an index, or in a file that the index does not
name for it. Equal copies are one tensor. Copies that differ are an error that names both places.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sagetrain.config.errors import ConfigError, is_there, many, refuse_pointer
from sagetrain.data.tokenizer_config import keys_in
from sagetrain.interop import fused_experts
from sagetrain.interop.causes import MERGE, no_weights
from sagetrain.interop.huggingface import INDEX, WEIGHTS

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# These are computed from config.json. Early folders hold them, or have them in the index alone.
_COMPUTED = re.compile(r".*\brotary_emb\.(original_)?(inv_freq|(cos|sin)_cached)")
# This many rows of a tensor are compared at a time.
_ROWS = 1024
_AGAIN = "copy the folder again from where it was published"


class WeightFiles:
    """The tensors of a folder by name, whichever files they are in."""

    def __init__(self, folder: Path, named: str | None, report: Callable[[str], None]):
        """Read the headers of all files. Raises ConfigError if files are missing or contradict each other.

        Args:
            named: the file of weights, or the index, that config.json names (transformers_weights).
            report: gets messages about files and tensors that are passed over.
        """
        self._folder = folder
        self._files: dict[str, str] = {}
        self._headers: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        self._stored: dict[str, str] = {}
        self._packed: dict[str, tuple[str, str]] = {}
        """The files of blocks and of scales of each tensor in MXFP4."""
        index, assigned, files = self._entry(named)
        if missing := [file for file in files if not is_there(folder / file)]:
            raise ConfigError(
                f"{folder}: files of weights are missing ({len(missing)} of {len(files)}), first: {missing[0]}; "
                f"{_AGAIN}"
            )
        there: dict[str, list[str]] = {}
        for file in files:
            with self._open(file) as opened:
                for name in itertools.filterfalse(_COMPUTED.fullmatch, opened.keys()):
                    stored = opened.get_slice(name)
                    there.setdefault(name, []).append(file)
                    self._headers[name, file] = tuple(stored.get_shape()), stored.get_dtype()
        for name, file in assigned.items():
            if file not in there.get(name, []):
                where = self.elsewhere(name)
                raise ConfigError(
                    f"{folder / index}: says that {file} holds {name}, which it does not{where}; {_AGAIN}"
                )
        for name, holders in there.items():
            self._files[name] = file = assigned.get(name, holders[0])
            if other := next((each for each in holders if not self._same(name, file, name, each)), None):
                says = f", where {index} says it is," if name in assigned else ""
                raise ConfigError(
                    f"{folder}: {name} is in {file}{says} and with other values in {other}: "
                    "transformers takes the one of the last file, other readers the one of the index; delete the "
                    f"copy that is not the model's, or {_AGAIN}"
                )
        if assigned and (unnamed := [name for name in there if name not in assigned]):
            report(
                f"{folder}: {many(len(unnamed), 'tensor')} that {INDEX} does not name, which transformers reads too, "
                f"first: {unnamed[0]}"
            )
        self._report_others({*files, index}, report)
        self._pair_mxfp4()

    def _pair_mxfp4(self) -> None:
        """Take blocks and scales in MXFP4 as one tensor in bf16."""
        for blocks in [name for name in self._files if name.endswith(fused_experts.BLOCKS)]:
            name = blocks.removesuffix(fused_experts.BLOCKS)
            scales, (shape, kind) = name + fused_experts.SCALES, self._header(blocks)
            packed = kind == "U8" and len(shape) == 4
            if packed and scales in self._files and self._header(scales) == (shape[:-1], "U8"):
                self._packed[name] = self._files.pop(blocks), self._files.pop(scales)
                self._files[name] = self._packed[name][0]
                self._headers[name, self._files[name]] = fused_experts.unpacked_shape(shape), "BF16"

    def _entry(self, named: str | None) -> tuple[str, dict[str, str], list[str]]:
        """Return the file that transformers begins with, the file that it assigns to each tensor, and all files of
        weights."""
        folder = self._folder
        if (adapter := folder / "adapter_config.json").exists():
            raise ConfigError(
                f"{adapter}: transformers takes this folder for an adapter of another model; {MERGE}, or delete the "
                "file if they are merged"
            )
        entry = named or next((each for each in (WEIGHTS, INDEX) if is_there(folder / each)), None)
        if entry is None or not (folder / _inside(entry, f"{folder / 'config.json'}: transformers_weights")).is_file():
            if named:
                raise ConfigError(f"{folder}: has no {named}, which config.json names; {_AGAIN}")
            raise ConfigError(no_weights(folder, WEIGHTS, INDEX))
        if named is None and entry == WEIGHTS and (folder / INDEX).is_file():
            assigned = self._weight_map(INDEX)
            if {*assigned.values()} != {WEIGHTS}:
                raise ConfigError(
                    f"{folder}: has {WEIGHTS}, which transformers reads, and {INDEX}, which names other files: delete "
                    "the one that is not the model's"
                )
            return INDEX, assigned, [WEIGHTS]
        if not entry.endswith(".index.json"):
            return entry, {}, [entry]
        assigned = self._weight_map(entry)
        return entry, assigned, sorted({*assigned.values()})

    def _weight_map(self, index: str) -> dict[str, str]:
        where = self._folder / index
        assigned = keys_in(where).get("weight_map")
        if not isinstance(assigned, dict) or not assigned:
            raise ConfigError(f"{where}: weight_map names no file; {_AGAIN}")
        return {
            name: _inside(file, f"{where}: weight_map: {name}")
            for name, file in assigned.items()
            if not _COMPUTED.fullmatch(name)
        }

    def _report_others(self, read: set[str], report: Callable[[str], None]) -> None:
        others = [each.name for kind in ("*.safetensors", "pytorch_model*.bin") for each in self._folder.glob(kind)]
        if left := sorted({*others} - read):
            report(f"{self._folder}: not read, nor by transformers: {', '.join(left)}")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self._folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            refuse_pointer(self._folder / file)
            raise ConfigError(f"{self._folder / file} cannot be read ({error}); copy it again") from error

    def elsewhere(self, name: str) -> str:
        """Return the name of another file of the folder that holds a tensor, for the message that the tensor is
        missing."""
        for file in sorted(each.name for each in self._folder.glob("*.safetensors")):
            with suppress(ConfigError):  # A file that is not needed may hold anything under this name.
                if name in self._open(file).keys():  # noqa: SIM118 - it is no dict
                    return f" ({file} has it)"
        return ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def rename(self, name: str, stored: str) -> None:
        """Rename a tensor that is stored under another name."""
        self._files[name] = self._files.pop(stored)
        self._stored[name] = stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as stored."""
        return self._header(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype as stored. Raises ConfigError for a dtype that cannot be read."""
        kind = self._header(name)[1]
        if kind not in _DTYPES:
            raise ConfigError(
                f"{self._folder}: {name} is {kind}: weights are read in {', '.join(_DTYPES)} alone; save the model in "
                "one of these, or take the folder in which it is published without quantization"
            )
        return _DTYPES[kind]

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._headers[self._stored.get(name, name), self._files[name]]

    def joined(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Return the values of several tensors, flattened, one behind the other, with one of them beside the result in
        memory."""
        sizes = [prod(self.shape(name)) for name in names]
        out = torch.empty(sum(sizes), dtype=dtype)
        for name, part in zip(names, out.split(sizes), strict=True):
            part.copy_(self.read(name, self.shape(name)))
        return out

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor's values, flattened, with rows of zeros up to `shape`. Raises ConfigError if one of them is
        NaN or infinite."""
        tensor = self._tensor(self._stored.get(name, name), self._files[name])
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            wrong = int((~tensor.isfinite()).sum())
            raise ConfigError(
                f"{self._folder / self._files[name]}: {name}: {wrong:,} of {tensor.numel():,} values are NaN or "
                f"infinite, and every loss would be NaN; {_AGAIN}, or take an earlier save of the model"
            )
        if tuple(tensor.shape) == shape:
            return tensor.flatten()
        out = tensor.new_zeros(shape)
        out[: len(tensor)] = tensor
        return out.flatten()

    def _tensor(self, name: str, file: str) -> torch.Tensor:
        if name in self._packed:
            ends = fused_experts.BLOCKS, fused_experts.SCALES
            parts = (self._tensor(name + end, each) for end, each in zip(ends, self._packed[name], strict=True))
            return fused_experts.unpacked(*parts)
        with self._open(file) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors hold the same values, whatever their dtypes."""
        stored = (self._stored.get(each, each) for each in (name, other))
        one, two = zip(stored, (self._files[name], self._files[other]), strict=True)
        return self._same(*one, *two)

    def _same(self, name: str, file: str, other: str, other_file: str) -> bool:
        if (name, file) == (other, other_file):
            return True
        shape = self._headers[name, file][0]
        if shape != self._headers[other, other_file][0]:
            return False
        with self._open(file) as first, self._open(other_file) as second:
            one, two = first.get_slice(name), second.get_slice(other)
            starts = range(0, shape[0], _ROWS) if shape else ()
            parts = (slice(start, start + _ROWS) for start in starts)
            return all(torch.equal(one[part].float(), two[part].float()) for part in parts)


def _inside(file: Any, where: str) -> str:
    """Return the name of a safetensors file, or of an index, in the folder. Raises ConfigError for anything else."""
    path = PurePosixPath(file) if isinstance(file, str) else PurePosixPath("/")
    if path.is_absolute() or ".." in path.parts or "\\" in str(file) or ":" in str(file):
        raise ConfigError(f"{where} {file!r}: no file of this folder, and no other is read; {_AGAIN}")
    if not path.name.endswith((".safetensors", ".safetensors.index.json")):
        raise ConfigError(f"{where} {file!r}: no .safetensors, and no other file is read; {_AGAIN}")
    return str(path)
