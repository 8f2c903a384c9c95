"""Token files of a store are those of a disk, and a host fetches each block once. The store is a folder here;
tests/storage has a server."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataConfig, DataSource, cached_path
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data import remote_blocks
from sagetrain.data.remote_blocks import BlockHashes, fetch_sources
from sagetrain.data.token_file import TokenFile
from sagetrain.data.token_files import TokenFiles
from sagetrain.storage.local import Local

TOKENS = 5000


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A folder that is a store, with a token file of ten blocks, and an empty cache."""
    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_blocks, "BLOCK", 1000)
    write(tmp_path / "store/train", 1)
    (tmp_path / "store/tokenizer.model").write_bytes(b"a model")
    return tmp_path / "store"


def write(path: Path, seed: int, **record: object) -> None:
    """Write a token file in two calls, the second of which goes on where the first has stopped."""
    tokens = np.random.default_rng(seed).integers(0, 500, TOKENS)
    first, second = TokenFileWriter(path).begin(512), None
    first.add(tokens[:1800], np.array([700, 1100]))
    so_far = first.written()
    first.abort(keep=True)
    second = TokenFileWriter(path).begin(512, so_far)
    second.add(tokens[1800:], np.array([TOKENS - 1800]))
    second.finish()
    second.publish({"sha256": second.sha256, "vocab_size": 512, **record})


def data(*paths: object, cache_gb: float = 1.0) -> DataConfig:
    sources = [DataSource(path=f"file://{path}") for path in paths]
    return DataConfig(train=sources, cache_gb=cache_gb, seq_length=64, micro_batch_size=1)


def fetched(cfg: DataConfig) -> TokenFile:
    fetch_sources(cfg)
    return TokenFiles(cfg.train[0], 64).files[0]


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The names of the files that are read from the store, in the order of the calls."""
    names, read = [], Local.read
    monkeypatch.setattr(Local, "read", lambda *a: names.append(a[1]) or read(*a))
    return names


def test_hashes_by_block_are_those_of_the_parts() -> None:
    for size in (0, 1, 999, 1000, 1001, 3000):
        content, hashes = os.urandom(size), BlockHashes()
        for low in range(0, size, 7):
            hashes.update(content[low : low + 7])
        whole = BlockHashes()
        whole.update(content)
        assert hashes.record() == whole.record()


def test_a_block_is_fetched_when_it_is_read_and_once(store: Path, reads: list[str]) -> None:
    cfg, local = data(store / "train"), TokenFile(store / "train")
    file = fetched(cfg)
    assert file.remote and not local.remote and "train.bin" not in reads
    assert cfg.tokenizer_path == str(Path(cached_path(cfg.train[0].path)).with_name("tokenizer.model"))
    assert Path(cfg.tokenizer_path).read_bytes() == b"a model"
    assert file.tokens(490, 510).tolist() == local.tokens(490, 510).tolist()  # In the first and the second block.
    assert file.tokens(0, 900).tolist() == local.tokens(0, 900).tolist()
    assert reads.count("train.bin") == 2
    again = fetched(cfg)
    assert again.tokens(0, 1000).tolist() == local.tokens(0, 1000).tolist() and reads.count("train.bin") == 2
    again.validate(deep=True)
    assert reads.count("train.bin") == 2 and again.identity() == local.identity()
    assert again.tokens(0, TOKENS).tolist() == local.tokens(0, TOKENS).tolist() and reads.count("train.bin") == 10
    assert again.content() == local.content() and reads.count("train.bin") == 10
    assert Path(f"{again.path}.bin").read_bytes() == (store / "train.bin").read_bytes()


def test_a_damaged_block_is_refused_and_a_new_file_fetched(store: Path) -> None:
    cfg = data(store / "train")
    with (store / "train.bin").open("r+b") as file:
        file.seek(2500)
        file.write(b"\xff\xff")
    opened = fetched(cfg)
    opened.tokens(0, 900)
    with pytest.raises(ConfigError, match=r"train.bin: bytes 2,000 to 3,000 do not have the hash that is recorded"):
        opened.tokens(900, 1300)
    write(store / "train", 2)
    local = TokenFile(store / "train")
    assert fetched(cfg).tokens(0, TOKENS).tolist() == local.tokens(0, TOKENS).tolist()


def test_patterns_name_the_files_that_are_there(store: Path) -> None:
    write(store / "other", 3)
    cfg = data(store / "*")
    fetch_sources(cfg)
    assert [Path(path).name for path in cfg.train[0].files] == ["other", "train"]


def test_what_cannot_be_fetched_is_named(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"store/none: no file://.*store/none.idx"):
        fetch_sources(data(store / "none"))
    with pytest.raises(ConfigError, match=r"data.cache_gb 1e-06: the token files in stores take 0.00 GB"):
        fetch_sources(data(store / "train", cache_gb=1e-6))
    record = json.loads((store / "train.json").read_text())
    del record["blocks"]
    (store / "train.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"its .json has no hashes by block, so its parts cannot be checked"):
        fetch_sources(data(store / "train"))
    (store / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"store/train: no train.bin; copy it there as well"):
        fetch_sources(data(store / "train"))


def test_the_cache_gives_up_what_nobody_reads(store: Path, tmp_path) -> None:
    for name in ("old", "used"):
        shutil.copytree(store, tmp_path / name)
    old, used = fetched(data(tmp_path / "old/train")), fetched(data(tmp_path / "used/train"))
    paths = [old.path, used.path]
    for file in (old, used):
        file.tokens(0, TOKENS)
    del old, file
    new = fetched(data(store / "train", cache_gb=15e-6))
    assert [os.path.exists(f"{path}.bin") for path in paths] == [False, True] and new.remote
    assert used.tokens(0, 10) is not None
