"""Checkpoints in a store are those on a disk, but for the way in which they appear and go. The store is a folder here;
tests/storage has a server."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

import tiny
from distributed import run_distributed
from forked import PATIENCE
from sagetrain.checkpoint import in_store, on_disk, reading
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.reading import Reader
from sagetrain.config.errors import CheckpointError
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.storage import lease
from sagetrain.storage.lease import OWNER, Lease
from sagetrain.storage.range_reader import send_folder
from sagetrain.storage.url_path import Location, UrlPath, store_at


@pytest.fixture
def root(tmp_path) -> UrlPath:
    return UrlPath(f"file://{tmp_path}/store/checkpoints")


def write(root: Location, step: int, keep_last: int = 100) -> None:
    """Save a checkpoint whose values are its step."""
    saver = tiny.saver(root, ParallelGroups.single(), keep_last)
    shard = tiny.owned("weight", {kind: torch.full((8,), float(step)) for kind in KINDS})
    saver.start(tiny.run_state(step, step * tiny.SEQ), "seed: 1\n", [shard], {"noise": torch.full((8,), step)})
    saver.wait()


def found(root: UrlPath, said: list[str] | None = None) -> Location | None:
    return on_disk.newest_whole(root, [].append if said is None else said.append)[0]


def both_places(root: str) -> list[str]:
    """Save the state of two tensor-parallel ranks on a disk and in a store, and load the latter again. Return what
    differs."""
    engine = tiny.engine(tiny.config(1, parallel={"tensor_parallel_size": 2}), tiny.join(2))
    tiny.global_step(engine, 0)
    here, there, rng, wrong = Path(root, "disk"), UrlPath(f"file://{root}/store"), rng_state(), []
    for place in (here, there):
        saver = tiny.saver(place, engine.groups)
        saver.start(tiny.run_state(1, 64), "seed: 1\n", engine.owned(), rng)
        saver.wait()
    folder, _ = on_disk.newest_whole(there, wrong.append)
    dist.barrier()
    files = sorted(path.name for path in (here / "step-00000001").iterdir())
    if files != store_at(folder).names():
        wrong.append(f"{files}, {store_at(folder).names()}")
    wrong += [name for name in files if (here / "step-00000001" / name).read_bytes() != (folder / name).read_bytes()]
    before = {(each.name, kind): each.read(kind).clone() for each in engine.owned() for kind in each.kinds}
    tiny.global_step(engine, 1)
    reader = Reader(folder)
    reading.load_engine(reader, engine, 1)
    if not reader.rng(dist.get_rank())["torch"].equal(rng["torch"]):
        wrong.append("rng")
    now = {(each.name, kind): each.read(kind) for each in engine.owned() for kind in each.kinds}
    return wrong + [f"{key}" for key, value in before.items() if not value.equal(now[key])]


def test_a_store_has_the_files_of_a_disk_to_the_byte(tmp_path) -> None:
    assert run_distributed(both_places, 2, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    "names", [["b|weight", "a.10|exp_avg", "a.2|exp_avg", 'né"\\|x'], ["w" * n for n in range(1, 9)]]
)
def test_blocks_are_the_bytes_of_safetensors(names: list[str]) -> None:
    tensors = {name: torch.randn(number) for number, name in enumerate(names, 1)}
    blocks, size = in_store.blocks_of(tensors)
    content = b"".join(blocks)
    assert content == save(tensors) and size == len(content)


def test_checkpoints_come_and_go(root: UrlPath) -> None:
    for step in (1, 2, 3, 4):
        write(root, step, keep_last=2)
    there = on_disk.published(root)
    assert [on_disk.step_of(folder) for folder in there] == [3, 4] and found(root) == on_disk.newest(root) == there[1]
    assert Reader(there[1]).local("weight", "exp_avg", 0, 1, 3, 5).tolist() == [4.0, 4.0]
    assert on_disk.whole_at(root, 3) == there[0] and on_disk.whole(root.parent, print) == there[1]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2; it has steps: 3, 4"):
        on_disk.whole_at(root, 2)
    kept = {name.partition("/")[0] for name in store_at(root).names()}
    steps = {f"step-{step:08d}.published" for step in (3, 4)}
    assert kept == {folder.name for folder in there} | steps | {"latest"}


def test_what_is_damaged_is_passed_over_and_set_aside(root: UrlPath) -> None:
    for step in (1, 2, 3):
        write(root, step)
    store, said = store_at(root), []
    one, two, three = on_disk.published(root)
    shard = "shard-tp000-dp000.safetensors"
    store.put(f"{three.name}/{shard}", bytes([*store.read(f"{three.name}/{shard}")[:-1], 1]))
    store.delete([f"{two.name}/{shard}"])
    assert found(root, said) == one
    assert f"{three / shard} does not match its SHA-256" in said[0] and f"{two / shard} is missing" in said[1]
    on_disk.set_aside(three)
    write(root, 3)  # Takes the place of the one that was set aside, whose files stay.
    assert found(root) not in (None, three) and on_disk.step_of(found(root)) == 3
    assert store.names(f"{three.name}/") and f"damaged-{three.name}" in store.names()
    store.put("step-00000003.published", b"step-00000003-00000000\n")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        Reader(on_disk.newest(root))


def test_only_unpublished_folders_are_cleared_away(root: UrlPath, monkeypatch) -> None:
    write(root, 1)
    store, names = store_at(root), type(store_at(root)).names
    store.put("step-00000002-0badc0de/manifest.json", b"of a killed run")
    store.put("step-mine/notes", b"of a person")
    write(root, 3)
    assert not store.names("step-00000002") and store.names("step-mine")
    # A store may list late. The newest checkpoint is known by its name then, and no published one is cleared away.
    monkeypatch.setattr(type(store), "names", lambda *a: [name for name in names(*a) if not name.endswith("published")])
    in_store.discard_unfinished(root)
    assert [on_disk.step_of(folder) for folder in on_disk.published(root)] == [3]
    monkeypatch.undo()
    assert [on_disk.step_of(folder) for folder in on_disk.published(root)] == [1, 3]


def test_what_a_killed_writer_left_of_a_file_is_removed(root: UrlPath, tmp_path) -> None:
    """A file that is half written has no name in the store, so the files that are deleted by name do not include it."""
    write(root, 1)
    target = UrlPath(f"file://{tmp_path}/export")
    for folder in (f"{root}/step-00000002-0badc0de", target):
        code = "import os, sys; from sagetrain.storage.url_path import UrlPath, store_at; "
        code += "blocks = (os._exit(9) if i else memoryview(b'half') for i in range(2)); "
        code += "store_at(UrlPath(sys.argv[1])).write('a', blocks, 8)"
        assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 9
    left = [*tmp_path.rglob("*.partial")]
    assert [path.read_bytes() for path in left] in ([b""] * 2, [b"half"] * 2) and not target.exists()
    write(root, 3)
    (tmp_path / "model").mkdir()
    send_folder(tmp_path / "model", target, last="config.json")
    assert not any(path.exists() or path.parent.exists() for path in left)
    assert [on_disk.step_of(folder) for folder in on_disk.published(root)] == [1, 3]


def test_a_second_writer_of_a_step_is_refused(root: UrlPath) -> None:
    write(root, 1)
    (first,) = on_disk.published(root)
    with pytest.raises(CheckpointError, match=r"another run saves its checkpoints there .*training.run_url of its own"):
        write(root, 1)
    assert on_disk.published(root) == [first] == [found(root)]
    assert {name.partition("/")[0] for name in store_at(root).names()} == {
        "latest",
        first.name,
        "step-00000001.published",
    }


def test_one_run_has_the_lease(root: UrlPath, monkeypatch) -> None:
    """A run that was killed takes its lease again at once. Another run waits to see whether the owner is alive, which
    renews its file in the first wait here, and not in the second."""
    said, now = [], [0.0]
    first, again, refused, other = (Lease(root, run, beat=1000) for run in ("one", "one", "two", "two"))

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if len(said) == 1:
            store_at(root).put(OWNER, first._owner())

    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    first.claim(said.append)
    with pytest.raises(CheckpointError, match=r"in use by another run, on host .*: give each run a training.run_url"):
        refused.claim(said.append)
    assert len(said) == 1 and "waiting 2500 s to see whether it is alive" in said[0] and now == [250]
    again.claim(said.append)  # As after kill -9.
    first.check()
    assert len(said) == 1
    other.claim(said.append)
    assert json.loads(store_at(root).read(OWNER))["run"] == "two" and len(said) == 2 and now == [2750]
    saver = tiny.saver(root, ParallelGroups.single())
    saver._folder._lease = again
    saver.start(tiny.run_state(1, tiny.SEQ), "", [], {})
    with pytest.raises(CheckpointError, match=r"has another owner by now.* a training.run_url of its own"):
        saver.wait()
    for each in (first, again):
        each.release()
    other.check()
    other.release()
    assert store_at(root).names() == []


def test_a_lease_is_renewed_as_long_as_it_is_held(root: UrlPath) -> None:
    owner, written = Lease(root, "one", beat=0.001), []
    owner.claim(print)
    deadline = time.monotonic() + PATIENCE
    while len(written) < 3 and time.monotonic() < deadline:
        if (found := store_at(root).read(OWNER)) not in written:
            written.append(found)
    owner.release()
    assert len(written) == 3 and store_at(root).names() == []
