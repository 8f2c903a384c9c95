"""The files of a checkpoint's pieces: each is opened once, however many tensors are read, and damage is named."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sagetrain.checkpoint import piece_files
from sagetrain.checkpoint.piece_files import PieceFiles
from sagetrain.checkpoint.reading import Reader
from sagetrain.config.errors import CheckpointError, ConfigError

RANKS, TENSORS, OWN = 300, 7, 6
"""300 ranks are more than the files for which room is asked at a time."""


class Written(Reader):
    """A reader of weights of which every rank has a piece, in files that `write` makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pieces = {"shape": [RANKS * OWN], "tp_dim": 0, "pieces": [[0, 0, RANKS, 0, OWN]]}
        self.tensors = {f"blocks.{number}": pieces for number in range(TENSORS)}
        ranks = [f"tp000-dp{rank:03d}" for rank in range(RANKS)]
        self.manifest = {"ranks": ranks, "layout": {"tensor_parallel_size": 1}}

    def write(self) -> None:
        for rank, file in enumerate(self.manifest["ranks"]):
            own = {f"{name}|weight": torch.arange(OWN) + OWN * rank + 0.0 for name in self.tensors}
            save_file(own, self.folder / f"shard-{file}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pieces")
    Written(path).write()
    return path


def held_open(folder: Path) -> int:
    """Count the files of `folder` that this process holds open. Other threads open other files meanwhile."""
    held = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The listing's own descriptor, or one that a thread closed.
            held += Path(os.readlink(f"/proc/self/fd/{number}")).parent == folder
    return held


@pytest.mark.parametrize("limited", [False, True])
def test_every_file_is_opened_once(folder: Path, monkeypatch, limited: bool) -> None:
    """A process that may open no more files opens them while it reads."""
    reader = Written(folder)
    opened, real = Counter[str](), piece_files.FileIO
    monkeypatch.setattr(piece_files, "FileIO", lambda path: opened.update([path.name]) or real(path))

    def refuse(*_: object) -> None:
        raise ConfigError("no more files")

    if limited:
        monkeypatch.setattr(piece_files, "allow_open_files", refuse)
    for name in reader.tensors:
        out = torch.empty(RANKS * OWN, dtype=torch.bfloat16)
        reader.fill(out, name, "weight", 0, 1)
        assert out.equal(torch.arange(RANKS * OWN).bfloat16())
    assert opened == {f"shard-{rank}.safetensors": TENSORS if limited else 1 for rank in reader.manifest["ranks"]}
    assert held_open(folder) == (0 if limited else RANKS)
    reader.close()
    assert held_open(folder) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_read_in_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(64).to(dtype)
    save_file({"a": torch.ones(3), "w": values}, tmp_path / "file", metadata={"format": "pt"})
    out = torch.empty(40)
    PieceFiles(tmp_path).read("file", "w", 24, out)
    assert out.equal(values[24:].float())


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda data: data[:4], "cut off"),
    (lambda data: data[:-1], "cut off"),
    (lambda data: b"\xff" * len(data), "no safetensors file"),
    (lambda data: data[:8] + b"x" + data[9:], "Expecting value"),
    (lambda data: data[:8] + b"[" + b" " * 6 + b"]" + b" " * (len(data) - 16), "its header is not that of safetensors"),
    (lambda data: data.replace(b"data_offsets", b"data_offset_"), "its header is not that of safetensors"),
    (lambda data: data.replace(b"blocks.0", b"blocks.x"), "blocks.0|weight is not in it"),
    (lambda data: data.replace(b'"F32"', b'"I32"'), "blocks.0|weight is I32"),
    (lambda data: data.replace(b"[0,24]", b"[0,20]"), "blocks.0|weight ends before value 6"),
])  # fmt: skip
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], said: str) -> None:
    (tmp_path / "shard-tp000-dp000.safetensors").write_bytes(
        spoil((folder / "shard-tp000-dp000.safetensors").read_bytes())
    )
    with pytest.raises(CheckpointError, match=rf"dp000.safetensors cannot be read \(.*({said})"):
        Written(tmp_path).local("blocks.0", "weight", 0, 1, stop=OWN)
