"""Checkpoints: exact, complete or absent, readable at every layout, and refused when damaged or foreign."""

import hashlib
import itertools
import json
import os
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from distributed import run_distributed
from manifests import rewrite
from sagetrain.checkpoint import on_disk, reading, saving, shares
from sagetrain.checkpoint.manifest import FORMAT, KINDS, MANIFEST, file_name, write_manifest, written_by_newer
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.stateful import Owned
from sagetrain.config.errors import CheckpointError
from sagetrain.parallel.topology import ParallelGroups

# The ranks, layout and dtype that save, and the layouts that go on by the number of their ranks. A layout is (tensor
# parallel, context parallel, ZeRO stage).
Layout = tuple[int, int, int]
CASES: list[tuple[int, Layout, str, dict[int, list[Layout]]]] = [
    (2, (1, 1, 1), "fp32", {1: [(1, 1, 0)], 2: [(2, 1, 1), (1, 1, 3), (1, 2, 2)], 4: [(2, 1, 2), (1, 2, 3)]}),
    (4, (2, 1, 2), "fp32", {1: [(1, 1, 1)], 2: [(2, 1, 3), (1, 2, 1)]}),
    (2, (2, 1, 3), "fp32", {1: [(1, 1, 0)], 2: [(1, 1, 1)]}),
    (2, (1, 2, 3), "fp32", {2: [(2, 1, 1)]}),
    (2, (2, 1, 1), "bf16", {2: [(2, 1, 1), (1, 1, 1), (1, 1, 3), (1, 2, 1)]}),
]


def save_engine(root: str, engine, step: int) -> Path:
    return tiny.save(Path(root), engine.groups, tiny.run_state(step, step * 64), engine.owned())


def full_tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = Reader(folder)
    return {
        f"{name}|{kind}": reader.local(name, kind, 0, 1).view(entry["shape"])
        for name, entry in reader.tensors.items()
        for kind in KINDS
    }


def train_and_save(root: str, layout: Layout, dtype: str) -> list[float]:
    """Take two steps, save a checkpoint, and return the losses of two more steps."""
    *sizes, stage = layout
    engine = tiny.engine(tiny.config(stage, dtype), tiny.join(*sizes))
    for step in range(2):
        tiny.global_step(engine, step)
    save_engine(root, engine, 2)
    return [tiny.global_step(engine, step).loss for step in (2, 3)]


def load_and_go_on(root: str, layouts: list[Layout], dtype: str) -> dict[tuple, tuple[bool, list]]:
    """Load at each layout. Return whether saving again gives the same tensors bit by bit, by the first rank, and the
    losses of the next two steps."""
    results, folder, world = {}, Path(root) / on_disk.folder_name(2), torch.distributed.get_world_size()
    for *sizes, stage in layouts:
        engine = tiny.engine(tiny.config(stage, dtype), tiny.join(*sizes), seed=99)
        reading.load_engine(Reader(folder), engine, optimizer_steps=2)
        again, same = save_engine(f"{root}/again-{world}-{sizes}-{stage}", engine, 2), True
        if engine.groups.rank == 0:
            before, after = full_tensors(folder), full_tensors(again)
            same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        results[(world, *sizes, stage)] = same, [tiny.global_step(engine, step).loss for step in (2, 3)]
    return results


def world_of(root: str, saves: bool, loads: bool) -> tuple[dict[int, list[float]], dict[int, dict]]:
    """Save every case of this number of ranks, and load those that are there, by the number of the case."""
    ranks, losses, found = torch.distributed.get_world_size(), {}, {}
    for number, (world, layout, dtype, targets) in enumerate(CASES):
        folder = f"{root}/{number}"
        if saves and world == ranks:
            losses[number] = train_and_save(folder, layout, dtype)
        elif loads and ranks in targets:
            found[number] = load_and_go_on(folder, targets[ranks], dtype)
    return losses, found


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory) -> tuple[Path, dict[int, list[float]], dict[int, list[dict]]]:
    """Return, by the number of the case, the losses of the run that saved and what each rank of the others found. Few
    worlds do all of it: those of four ranks load what two have saved, and save what one and two load."""
    root, losses, found = tmp_path_factory.mktemp("layouts"), {}, {}
    for world, saves, loads in ((2, True, False), (4, True, True), (1, False, True), (2, False, True)):
        for rank, (saved, loaded) in enumerate(run_distributed(world_of, world, str(root), saves, loads)):
            losses |= saved if rank == 0 else {}
            for number, results in loaded.items():
                found.setdefault(number, []).append(results)
    return root, losses, found


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "{}-{}-{}".format(*CASES[number][:3]))
def test_any_layout_continues_any_other(gone_on, number: int) -> None:
    root, losses, found = gone_on
    world, layout, dtype, targets = CASES[number]
    assert not [name for name in os.listdir(root / str(number)) if name.startswith(".writing")]
    assert len(found[number]) == sum(targets)
    for rank in found[number]:
        for target, (same, later) in rank.items():
            assert same, f"{target}: saving what was loaded gives other tensors"
            assert later == pytest.approx(losses[number], abs=1e-5 if dtype == "fp32" else 2e-2), target
            if dtype == "bf16" and target == (world, *layout):
                assert later == losses[number]  # The same layout continues bit by bit.


def as_format_1(folder: Path) -> None:
    """Rewrite a checkpoint as version 1 of the format would have written it: a file a rank, and an object a piece."""
    rewrite(folder, partial(to_format_1, folder))


def to_format_1(folder: Path, manifest: dict) -> None:
    ranks = manifest.pop("ranks")
    for rank in ranks:
        both = [folder / file_name(kind, rank) for kind in ("weight", "exp_avg")]
        save_file({name: value for file in both for name, value in load_file(file).items()}, both[0])
        both[1].unlink()
        del manifest["files"][both[1].name]
        content = both[0].read_bytes()
        manifest["files"][both[0].name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for entry in manifest["tensors"].values():
        entry["pieces"] = [
            {"file": file_name("weight", ranks[rank + i]), "tp_rank": tp_rank,
             "start": start + i * length, "stop": start + (i + 1) * length}
            for tp_rank, rank, count, start, length in entry["pieces"] for i in range(count)
        ]  # fmt: skip
    manifest["format"] = 1


def goes_on_from_format_1(root: str, layouts: list[tuple[int, int, int]]) -> list[bool]:
    """Return whether the next loss is the same to the last bit, from either form of one checkpoint."""
    same = []
    for *sizes, stage in layouts:
        engine = tiny.engine(tiny.config(stage, "bf16"), tiny.join(*sizes))
        tiny.global_step(engine, 0)
        place = Path(root) / f"{sizes}{stage}"
        folder, losses = save_engine(str(place), engine, 1), []
        for old in (False, True):
            if old and engine.groups.rank == 0:
                as_format_1(folder)
            torch.distributed.barrier()
            assert on_disk.newest_whole(place, print) == (folder, [])
            other = tiny.engine(tiny.config(stage, "bf16"), engine.groups, seed=99)
            reading.load_engine(Reader(folder), other, 1)
            losses.append([tiny.global_step(other, step).loss for step in (1, 2)])
        same.append(losses[0] == losses[1])
    return same


def test_a_checkpoint_of_format_1_is_read_as_before(tmp_path) -> None:
    assert run_distributed(goes_on_from_format_1, 2, str(tmp_path), [(2, 1, 1), (1, 1, 3)]) == [[True] * 2] * 2


def values_read(root: str, layouts: list[tuple[int, int, int, str]]) -> dict[tuple, int]:
    """Return how many values this rank reads to load a checkpoint of its own."""
    found, read = {}, Reader._range

    def counting(self: Reader, name: str, kind: str, tp_rank: int, start: int, stop: int) -> torch.Tensor:
        found[layout] = found.get(layout, 0) + stop - start
        return read(self, name, kind, tp_rank, start, stop)

    Reader._range = counting
    for layout in layouts:
        *sizes, stage, dtype = layout
        engine = tiny.engine(tiny.config(stage, dtype), tiny.join(*sizes))
        folder = save_engine(f"{root}/{layout}", engine, 1)
        torch.distributed.barrier()
        reading.load_engine(Reader(folder), engine, 1)
    return found


def test_the_ranks_together_read_a_checkpoint_once(tmp_path) -> None:
    layouts = [(1, 1, 0, "fp32"), (1, 1, 1, "fp32"), (1, 1, 1, "bf16"), (1, 1, 2, "bf16"), (1, 1, 3, "bf16")]
    model = tiny.model(tiny.config(0), ParallelGroups.single())
    whole = len(KINDS) * sum(p.numel() for p in model.parameters())
    for world, cases in ((2, [*layouts, (1, 2, 1, "bf16")]), (4, [layouts[0], layouts[2], layouts[4]])):
        ranks = run_distributed(values_read, world, str(tmp_path / str(world)), cases)
        for layout in cases:
            assert sum(rank.get(layout, 0) for rank in ranks) == whole, (world, layout)


def test_a_reader_of_weights_looks_at_no_moments(tmp_path, monkeypatch) -> None:
    """The reader does not look at the state of random generators either. A checkpoint without moments serves this
    use."""
    shard = flat_shard(40)
    write_plain(tmp_path, 1, 1, [shard])
    folder, looked = tmp_path / "step-00000001", []
    sha256 = on_disk.sha256
    monkeypatch.setattr(on_disk, "sha256", lambda path: looked.append(path.name) or sha256(path))
    for find in (
        lambda: on_disk.newest_whole(tmp_path, print, moments=False)[0],
        lambda: on_disk.whole_at(tmp_path, 1, moments=False),
        lambda: on_disk.whole(folder, print, moments=False),
    ):
        assert find() == folder
        assert looked == ["config.yaml", "shard-tp000-dp000.safetensors"]
        looked.clear()
    (folder / "moments-tp000-dp000.safetensors").unlink()
    assert on_disk.whole(folder, print, moments=False) == folder
    assert Reader(folder).local("weight", "weight", 0, 1).equal(shard.weight)
    with pytest.raises(CheckpointError, match=r"moments-tp000-dp000\.safetensors is missing"):
        on_disk.whole(folder, print)


def test_the_manifest_of_a_thousand_ranks_is_small(tmp_path) -> None:
    """The model has 300 tensors at ZeRO 3 on 1,024 ranks and, with another end, at ZeRO 1."""
    world, tensors, size = 1024, 300, 4096 * 4096
    every = [np.array([[rank * size // world, (rank + 1) * size // world]] * tensors) for rank in range(world)]
    pieces = list(shares._runs([0] * world, every, [True] * tensors))
    text = json.dumps(pieces)
    assert len(text) < 40 * tensors
    assert pieces == [[[0, 0, world, 0, size // world]]] * tensors


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(1, 9))
def test_runs_are_the_pieces_that_were_written(lengths: list[list[int]], first: int) -> None:
    """The lists are the lengths of consecutive pieces of one tensor, for each tensor-parallel slice. Some pieces are
    empty."""
    tp_ranks, ranges, expected = [], [], {}
    for tp_rank, own in enumerate(lengths):
        for start, stop in itertools.pairwise(itertools.accumulate(own, initial=first)):
            if stop > start:
                expected[tp_rank, start, stop] = len(ranges)
            tp_ranks.append(tp_rank)
            ranges.append(np.array([[start, stop]]))
    (runs,) = shares._runs(tp_ranks, ranges, [True])
    found = {
        (tp_rank, start + i * length, start + (i + 1) * length): rank + i
        for tp_rank, rank, count, start, length in runs
        for i in range(count)
    }
    assert found == expected


def write_pieces(folder: Path, tensor: torch.Tensor, dim: int | None, tp_size: int) -> None:
    """Write a checkpoint of one tensor. Each tensor-parallel slice of it is in three uneven pieces."""
    pieces = []
    for tp_rank in range(1 if dim is None else tp_size):
        flat = (tensor if dim is None else tensor.chunk(tp_size, dim)[tp_rank]).flatten()
        for part, (start, stop) in enumerate(itertools.pairwise([0, 5, flat.numel() - 3, flat.numel()])):
            file = f"{tp_rank}-{part}.safetensors"
            save_file({"w|weight": flat[start:stop].clone()}, folder / file)
            pieces.append({"file": file, "tp_rank": tp_rank, "start": start, "stop": stop})
    manifest = {
        "format": FORMAT,
        "state": {"step": 0, "tokens": 0, "identity": {}},
        "files": {piece["file"]: {"bytes": 0, "sha256": ""} for piece in pieces},
        "layout": {"tensor_parallel_size": tp_size},
        "tensors": {"w": {"shape": list(tensor.shape), "tp_dim": dim, "pieces": pieces}},
    }
    write_manifest(folder, manifest)


@pytest.mark.parametrize("source", [1, 2, 4])
@pytest.mark.parametrize(("shape", "dim"), [((16, 6), 0), ((6, 16), 1), ((48,), 0), ((5, 7), None)])
def test_any_range_of_any_slice_reads_exactly(tmp_path, monkeypatch, shape, dim, source) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    write_pieces(tmp_path, tensor, dim, source)
    reader = Reader(tmp_path)
    for block, target in itertools.product((1, 7, 1 << 20), (1, 2, 8)):
        monkeypatch.setattr(reading, "_BLOCK", block)
        for rank in range(target):
            expected = (tensor if dim is None else tensor.chunk(target, dim)[rank]).flatten()
            assert reader.local("w", "weight", rank, target).equal(expected)
            for start, stop in ((0, 1), (1, expected.numel()), (expected.numel() // 3, expected.numel() - 1)):
                filled = torch.full((stop - start,), -1, dtype=torch.float64)
                reader.fill(filled, "w", "weight", rank, target, start)
                assert filled.float().equal(expected[start:stop])


def single_engine(stage: int = 0, **sections: dict):
    return tiny.engine(tiny.config(stage, **sections), tiny.join(1))


def write_plain(root: Path, step: int, sequences: int, shards: Sequence[Owned] = ()) -> None:
    tiny.save(root, ParallelGroups.single(), tiny.run_state(step, sequences * tiny.SEQ), shards)


def flat_shard(size: int) -> Owned:
    """Return a parameter that one rank has all of."""
    return tiny.owned("weight", {kind: torch.rand(size) for kind in KINDS})


@pytest.mark.parametrize(("file", "spoiled", "words"), [
    ("shard-tp000-dp000.safetensors", lambda data: data[:-5], "bytes instead of"),
    ("shard-tp000-dp000.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match its SHA-256"),
    ("shard-tp000-dp000.safetensors", None, "is missing"),
    (MANIFEST, lambda data: data[:100], "manifest.json cannot be read"),
    (MANIFEST, None, "manifest.json cannot be read"),  # The checkpoint was copied in part.
])  # fmt: skip
def test_damage_is_found_and_the_run_walks_back(
    tmp_path, file: str, spoiled: Callable[[bytes], bytes] | None, words: str
) -> None:
    for step in (1, 2):
        write_plain(tmp_path, step, 10, [flat_shard(4)])
    content = (path := tmp_path / "step-00000002" / file).read_bytes()
    path.write_bytes(spoiled(content)) if spoiled else path.unlink()
    said: list[str] = []
    assert on_disk.newest_whole(tmp_path, said.append) == (tmp_path / "step-00000001", [path.parent])
    assert len(said) == 1 and words in said[0]


def test_the_umask_says_who_may_read_a_checkpoint(tmp_path) -> None:
    before = os.umask(0o027)
    try:
        write_plain(tmp_path, 1, 1, [flat_shard(4)])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert {"shard-tp000-dp000.safetensors", "moments-tp000-dp000.safetensors"} < modes.keys()
    assert set(modes.values()) == {0o640}


def test_all_damaged_is_an_error_and_none_is_a_fresh_start(tmp_path) -> None:
    assert on_disk.newest_whole(tmp_path / "absent", print) == (None, [])
    write_plain(tmp_path, 1, 10)
    (tmp_path / "step-00000001" / "config.yaml").write_text("changed")
    (tmp_path / "step-00000002").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(2 damaged\)"):
        on_disk.newest_whole(tmp_path, print)


def test_a_checkpoint_that_goes_while_it_is_read_is_not_damaged(tmp_path, monkeypatch) -> None:
    """The run goes on, saves newer checkpoints, and removes this one."""
    write_plain(tmp_path, 1, 10)
    sha256, said = on_disk.sha256, []

    def late(path: Path) -> str:
        if (tmp_path / "step-00000001").exists():
            write_plain(tmp_path, 2, 20)
            on_disk.prune(tmp_path, keep_last=1, keep_every_tokens=None)
        return sha256(path)

    monkeypatch.setattr(on_disk, "sha256", late)
    found, damaged = on_disk.newest_whole(tmp_path, said.append)
    assert (found, damaged, said) == (tmp_path / "step-00000002", [], [])


@pytest.mark.parametrize("path", [
    *(["state"], ["layout"], ["tensors"], ["files"], ["state", "step"], ["layout", "tensor_parallel_size"]),
    *(["tensors", "weight", "pieces"], ["files", "config.yaml", "sha256"]),
], ids=".".join)  # fmt: skip
def test_a_manifest_that_lacks_something_is_damaged(tmp_path, path: list[str]) -> None:
    for step in (1, 2, 3):
        write_plain(tmp_path, step, 10 * step, [flat_shard(4)])
    for step in (1, 3):
        *sections, key = path
        rewrite(tmp_path / on_disk.folder_name(step), lambda tree: reduce(dict.__getitem__, sections, tree).pop(key))  # noqa: B023
    said: list[str] = []
    found, damaged = on_disk.newest_whole(tmp_path, said.append)
    assert found == tmp_path / on_disk.folder_name(2) and [folder.name[-1] for folder in damaged] == ["3"]
    assert f"manifest.json: {'.'.join(path)}: missing" in said[0]
    on_disk.prune(tmp_path, keep_last=1, keep_every_tokens=None)
    assert len(on_disk.published(tmp_path)) == 3  # Checkpoints that cannot be read are left to people.


def test_a_flipped_bit_of_a_manifest_is_seen(tmp_path) -> None:
    """A bit of every byte is flipped, another one than of the byte before; and every bit of the hash's key, without
    which it would look like an older manifest."""
    write_plain(tmp_path, 1, 10, [flat_shard(4)])
    folder = tmp_path / on_disk.folder_name(1)
    content = (folder / MANIFEST).read_bytes()
    key = content.rindex(b'"sha256": "')
    passed = []
    for bit in {*range(0, 8 * len(content), 9), *range(8 * key, 8 * (key + 12))}:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(changed)
        if not on_disk.problems(folder, contents=False) or written_by_newer(folder):
            passed.append(bytes(changed))
    assert not passed


def test_a_manifest_of_before_the_hash_is_read(tmp_path) -> None:
    write_plain(tmp_path, 1, 10, [flat_shard(4)])
    path = tmp_path / on_disk.folder_name(1) / MANIFEST
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}))
    assert on_disk.newest_whole(tmp_path, print) == (path.parent, [])


CONTRADICTIONS: dict[str, tuple[Callable[[dict], object], str]] = {
    "a shard that is not listed": (
        lambda tree: tree["files"].pop("shard-tp000-dp000.safetensors"),
        r"files: lacks shard-tp000-dp000\.safetensors, which has pieces of weight",
    ),
    "moments that are not listed": (
        lambda tree: tree["files"].pop("moments-tp000-dp000.safetensors"),
        r"files: lacks moments-tp000-dp000\.safetensors",
    ),
    "no ranks": (lambda tree: tree.update(ranks=[]), "its pieces are on ranks 0 to 0 of 0"),
    "a file elsewhere": (
        lambda tree: tree["files"].update({"../rng": tree["files"]["config.yaml"]}),
        r"'\.\./rng' is not the name of a file in the folder",
    ),
    "a negative place": (
        lambda tree: tree["tensors"]["weight"].update(pieces=[[0, 0, 1, -4, 8]]),
        "greater than or eq",
    ),
    "a large count": (lambda tree: tree["tensors"]["weight"].update(pieces=[[0, 0, 10**12, 0, 4]]), "each value once"),
    "a gap": (lambda tree: tree["tensors"]["weight"].update(pieces=[[0, 0, 1, 0, 3]]), "each value once"),
    "an overlap": (lambda tree: tree["tensors"]["weight"].update(pieces=[[0, 0, 1, 0, 4]] * 2), "each value once"),
    "another slice": (lambda tree: tree["tensors"]["weight"].update(pieces=[[1, 0, 1, 0, 4]]), "each value once"),
    "a large shape": (lambda tree: tree["tensors"]["weight"].update(shape=[10**9, 10**9]), "each value once"),
    "another dimension": (lambda tree: tree["tensors"]["weight"].update(tp_dim=1), r"dimension 1 of shape \[4\]"),
    "other tokens": (lambda tree: tree["state"].update(tokens=1), r"state\.tokens: 1 are not 10 sequences"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_parts_of_a_manifest_that_disagree_are_damage(tmp_path, name: str) -> None:
    """An older whole checkpoint is taken, whether the manifest has a hash or was written before there was one."""
    for step in (1, 2):
        write_plain(tmp_path, step, 10, [flat_shard(4)])
    change, words = CONTRADICTIONS[name]
    rewrite(tmp_path / on_disk.folder_name(2), change)
    said: list[str] = []
    found, _ = on_disk.newest_whole(tmp_path, said.append)
    assert found == tmp_path / on_disk.folder_name(1)
    assert re.search(rf"manifest\.json: .*{words}", said[0])


def test_retention_keeps_the_newest_and_the_milestones(tmp_path) -> None:
    for step in range(1, 9):
        write_plain(tmp_path, step, sequences=step * 30)
    on_disk.prune(tmp_path, keep_last=2, keep_every_tokens=100 * tiny.SEQ)
    # 120 sequences are the first at or past 100, and 210 the first at or past 200.
    assert sorted(f.name for f in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (4, 7, 8)]
    assert (tmp_path / "latest").read_text() == "step-00000008\n"


def test_a_checkpoint_that_somebody_protects_stays(tmp_path) -> None:
    """The protected checkpoint stops nothing. Root does not remove it either."""
    for step in range(1, 5):
        write_plain(tmp_path, step, step)
    (tmp_path / "step-00000001").chmod(0o555)
    with pytest.warns(UserWarning, match="an old checkpoint stays.*step-00000001"):
        on_disk.prune(tmp_path, keep_last=2, keep_every_tokens=None)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["latest", *(f"step-0000000{n}" for n in (1, 3, 4))]


def test_set_aside_never_overwrites(tmp_path) -> None:
    for _ in range(2):
        write_plain(tmp_path, 1, 10)
        on_disk.set_aside(tmp_path / "step-00000001")
    names = sorted(folder.name for folder in tmp_path.glob("damaged-*"))
    assert names == ["damaged-step-00000001", "damaged-step-00000001-1"]


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    write_plain(tmp_path, 1, 10)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000002: rank 0: .*No space left"):
        write_plain(tmp_path, 2, 20)
    assert on_disk.newest_whole(tmp_path, print)[0].name == "step-00000001"
    monkeypatch.undo()
    write_plain(tmp_path, 2, 20)  # The leftovers of the failure do not disturb this save.
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000002"]


def load_foreign(root: str, model: dict) -> str:
    save_engine(root, single_engine(), 1)
    other = single_engine(model=model)
    reader = Reader(Path(root) / "step-00000001")
    try:
        reading.load_engine(reader, other, 1)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    message = run_distributed(load_foreign, 1, str(tmp_path), {"ffn_hidden_size": 64})[0]
    assert "holds another model" in message
    assert "checkpoint (48, 32), model (64, 32)" in message
    assert "training.run_dir" in message


def test_a_run_does_not_go_back_past_a_newer_format(tmp_path) -> None:
    """A checkpoint of a newer SageTrain is not damaged. The run is refused, and the checkpoint keeps its name."""
    for step in (1, 2):
        write_plain(tmp_path, step, 10)
    rewrite(folder := tmp_path / "step-00000002", lambda tree: tree.update(format=99))
    with pytest.raises(CheckpointError, match=r"step-00000002: written in format 99.*a newer one"):
        on_disk.newest_whole(tmp_path, print)
    with pytest.raises(CheckpointError, match="format 99, this SageTrain reads formats 1 to 3"):
        Reader(folder)
    assert folder.exists()


class Malicious:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_runs_no_code(tmp_path) -> None:
    """The checkpoint's manifest vouches for the file, and still no code runs."""
    write_plain(tmp_path / "run", 1, 10)
    folder, ran = tmp_path / "run" / "step-00000001", tmp_path / "ran"
    (folder / "rng-00000.pt").write_bytes(pickle.dumps(Malicious(ran)))
    torch.save({"torch": Malicious(ran)}, folder / "rng-00001.pt")
    files = {}
    for name in ("rng-00000.pt", "rng-00001.pt"):
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(folder, lambda tree: tree["files"].update(files))
    assert on_disk.newest_whole(tmp_path / "run", print)[0] == folder
    reader = Reader(folder)
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match="cannot be read as data"):
            reader.rng(rank)
    assert not ran.exists()
    with (folder / "rng-00000.pt").open("rb") as file:
        pickle.load(file).close()  # An unsafe reader would have done this.
    assert ran.exists()
