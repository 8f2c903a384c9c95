"""Copies in memory: four ranks on two hosts find the newest step that is whole somewhere, and restore its bits."""

import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from sagetrain.checkpoint import slots
from sagetrain.checkpoint.in_memory import CopiesInMemory
from sagetrain.checkpoint.reading import Reader, load_engine
from sagetrain.checkpoint.slots import CopyFolder
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.costs.accounting import total_bytes
from sagetrain.costs.host_memory import HOST_SHARE, host_memory_finding, host_memory_per_rank
from sagetrain.engines.step import Engine
from sagetrain.parallel.rng import rng_state
from sagetrain.training import copying

STEPS = 3
foreach_copy = torch._foreach_copy_
LAYOUTS = [(2, 1), (1, 3), (1, 0)]


def take(engine: Engine, copies: CopiesInMemory, step: int, published: int = 0) -> list[torch.Tensor]:
    """Take a step and a copy of the state, which is returned."""
    tiny.global_step(engine, step)
    copies.take(tiny.run_state(step, step * tiny.SEQ), published, rng_state())
    found = tiny.state_of(engine)
    copies.settle()
    while copies.busy:
        time.sleep(0.01)
    return found


def flip(path: Path, place: int = 20_000) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def copies_of(root: Path, pattern: str, step: int) -> list[Path]:
    return [path for path in root.glob(f"*/*/{pattern}") if (CopyFolder(path).header() or {}).get("step") == step]


def lose_host(root: Path) -> None:
    shutil.rmtree(root / "host-0")


def flip_one(root: Path) -> None:
    for folder in copies_of(root, "copy-*-of-rank-3", STEPS):
        flip(next(folder.glob("moments-*")))


def half_a_copy(root: Path) -> None:
    for folder in copies_of(root, "*-of-rank-2", STEPS):
        (folder / "copy.json").unlink()


def lose_all(root: Path) -> None:
    lose_host(root)
    for step in (STEPS, STEPS - 1):
        for folder in copies_of(root, "held-*-of-rank-1", step):
            flip(next(folder.glob("rng-*")), 100)


def first_is_left_out(root: Path) -> None:
    """The second host has the ranks of the first one now, and a spare one those of the second."""
    lose_host(root)
    (root / "host-1").rename(root / "host-0")


def hosts_in_other_order(root: Path) -> None:
    (root / "host-1").rename(root / "other")
    (root / "host-0").rename(root / "host-1")
    (root / "other").rename(root / "host-0")


CASES: list[tuple[Callable[[Path], object], int | None]] = [
    (lambda root: None, STEPS),
    (first_is_left_out, STEPS),
    (hosts_in_other_order, STEPS),
    (flip_one, STEPS),
    (half_a_copy, STEPS - 1),
    (lose_all, None),
]


def world(root: str) -> None:
    rank, folder = int(os.environ["RANK"]), Path(root)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    slots.ROOT = folder / "memory" / f"host-{rank // 2}"
    for tp_size, stage in LAYOUTS:
        groups, cfg, said = tiny.join(tp_size), tiny.config(stage), []
        layout, run = {"stage": stage}, f"{tp_size}{stage}"

        def begin(run: str = run, layout: dict = layout, groups=groups, said: list = said) -> CopiesInMemory:
            return CopiesInMemory(run, groups, layout, 1, said.append)

        engine, copies = tiny.engine(cfg, groups), begin()
        assert copies.newest(0, 0) is None
        copies.prepare(engine.owned(), "{}")
        found = {step: take(engine, copies, step) for step in range(1, STEPS + 1)}
        dist.barrier()  # No rank copies any more.
        if rank == 0:
            shutil.copytree(folder / "memory", folder / "before")
        dist.barrier()
        assert begin(layout={"stage": 5}).newest(0, 0) is None, "copies of another layout"
        for damage, expected in CASES if tp_size == 2 else CASES[:2]:
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / "memory")
                shutil.copytree(folder / "before", folder / "memory")
                damage(folder / "memory")
            dist.barrier()
            copies = begin()
            newest = copies.newest(0, 0)
            assert (newest is None) == (expected is None), damage
            dist.barrier()
            assert len(list(slots.ROOT.glob("*/*-of-rank-*"))) <= 8, "two ranks have two copies, and hold two"
            if newest and expected:
                restored = tiny.engine(cfg, groups, seed=8)
                assert Reader(newest).state.step == expected, damage
                load_engine(Reader(newest), restored, expected)
                assert Reader(newest).rng(rank) is not None
                assert all(map(torch.equal, tiny.state_of(restored), found[expected])), damage
                # The run goes on, and copies again.
                copies.prepare(restored.owned(), "{}")
                take(restored, copies, expected + 1, published=7)
        if rank == 0:
            shutil.rmtree(folder / "before")
        copies = begin()
        assert copies.newest(expected + 1 if expected else STEPS, 7) is None, "a checkpoint is as new"
        copies.prepare(engine.owned(), "{}")
        copied, looked = [], threading.Event()

        def late(*how: Any, **more: Any) -> None:
            looked.wait()  # noqa: B023
            time.sleep(0.05)
            copied.append(foreach_copy(*how, **more))  # noqa: B023

        with patch.object(torch, "_foreach_copy_", late):
            copies.take(tiny.run_state(9, 9 * tiny.SEQ), 0, rng_state())
            assert not copied, "the copy is made beside the next step"
            looked.set()
            copies.settle()
            assert len(copied) == bool(copies._sources), "the next update would change what is copied"
        copies.end()
        assert said == []


def test_the_newest_whole_copies_are_found(tmp_path: Path) -> None:
    run_distributed(world, 4, str(tmp_path))


def alone(root: str) -> None:
    """Check on one rank what a run finds of an earlier one, and that a full memory is an error."""
    slots.ROOT, groups, said = Path(root), tiny.join(1), []
    engine = tiny.engine(tiny.config(1), groups)
    copies = CopiesInMemory("first", groups, {}, 2, said.append)
    assert (copies.due(3), copies.due(4)) == (False, True)
    copies.prepare(engine.owned(), "{}")
    take(engine, copies, 1, published=9)
    assert not copies.late(0.0), "no copy is under way"

    looked = threading.Semaphore(0)

    def slow(*how: Any, **more: Any) -> None:
        looked.acquire()
        time.sleep(0.05)
        foreach_copy(*how, **more)

    with patch.object(torch, "_foreach_copy_", slow):
        for step in (2, 3):
            # Nothing but its own host keeps such a copy waiting, so the next one is taken if it will be whole by then.
            copies.take(tiny.run_state(step, step * tiny.SEQ), 9, rng_state())
            now = copies._began
            assert copies.late(now) and not copies.late(now + 60)
            if step == 3:
                assert (copies._own[1].header() or {})["step"] == 2 and copies.busy, "the copy before is whole"
            looked.release()
    while copies.busy:
        time.sleep(0.01)
    again = CopiesInMemory("first", groups, {}, 2, said.append)
    assert again.newest(0, 8) is None, "somebody has removed the checkpoint of step 9"
    copies._lock.close()
    again._lock.close()
    other = CopiesInMemory("second", groups, {}, 2, said.append)
    assert [path.name.rpartition("-")[2] for path in Path(root).iterdir()] == ["second"], "what is left of ended runs"

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    os.posix_fallocate = full
    with pytest.raises(ConfigError, match=r"in_memory_every 2: rank 0 on .* GiB of .* \(No space left.*--shm-size"):
        other.prepare(engine.owned(), "{}")


def test_copies_of_other_runs_and_full_memory(tmp_path: Path) -> None:
    run_distributed(alone, 1, str(tmp_path))


def test_the_next_copy_is_expected_beside_steps_without_one(monkeypatch) -> None:
    """A step whose update waited for a copy is longer, and would make that copy look short."""
    clock, ends, busy = [100.0], [], []
    monkeypatch.setattr(copying.time, "monotonic", lambda: clock[0])
    copies = SimpleNamespace(late=lambda end: bool(ends.append(round(end, 3))), due=lambda step: step > 3)
    copies.take = lambda *state: None
    engine = SimpleNamespace(
        groups=SimpleNamespace(metrics=SimpleNamespace(sum=lambda name, value: busy.append(value)))
    )
    run = SimpleNamespace(met=SimpleNamespace(copies=copies), engine=engine, saver=SimpleNamespace(published_step=0))
    run.controllers, run.record = SimpleNamespace(state=dict), lambda state: None
    watched = copying.Copying(run)
    for step, seconds in enumerate((5.0, 0.25, 0.5, 0.25, *[0.125] * 18), 1):
        watched.tell()
        clock[0] += seconds
        watched.after_step(SimpleNamespace(step=step), SimpleNamespace(metrics={copying._BUSY: busy[-1]}))
    assert ends[:6] == [100.0, 110.0, 105.5, 106.0, 106.25, 106.375] and ends[-1] == clock[0]
    assert [step for step, late in enumerate(busy, 1) if late] == [20], "one of many is left out"


@pytest.mark.parametrize(("sections", "key"), [
    ({"parallel": {"zero_stage": 1, "engine": "deepspeed"}}, "parallel.engine"),
    ({"parallel": {"engine": "auto", "gradient_reduction": "bf16"}}, "parallel.gradient_reduction"),
    ({"parallel": {"zero_stage": 1, "pipeline_parallel_size": 2}}, "parallel.pipeline_parallel_size"),
    ({"parallel": {"zero_stage": 1, "offload": "optimizer"}}, "parallel.offload"),
    ({"training": {"activation_offload": True, "activation_checkpointing": "full"}}, "training.activation_offload"),
    ({"model": {"experts": {"number": 4, "per_token": 2, "ffn_size": 16}}}, "model.experts"),
])  # fmt: skip
def test_what_was_not_tried_is_refused_by_name(sections: dict, key: str) -> None:
    cfg = tiny.config(1, checkpoint={"in_memory_every": 1}, **sections)
    found = [each for each in check(cfg, 2, files=False) if each.rule == "in_memory_untried"]
    assert [each.key for each in found] == [key]
    assert "per_token=" not in str(found[0])  # A section is named, and not written out.


def test_copies_that_do_not_fit_a_host_are_an_error() -> None:
    cfg = tiny.config(1, checkpoint={"in_memory_every": 1})
    whole = sum(4 * math.prod(shape) * 3 for shape in ((2, 128, 32), (2, 4, 32, 32), (2, 3, 32, 48)))
    for ranks, copies in ((8, 2), (4, 4)):
        (kept, written, _) = host_memory_per_rank(cfg, 8, 128, one_host=ranks == 8)
        assert kept.bytes == copies * written.bytes and 8 * written.bytes == pytest.approx(whole, rel=0.01)
        needed = ranks * total_bytes(host_memory_per_rank(cfg, 8, 128, one_host=ranks == 8)) / HOST_SHARE
        assert host_memory_finding(cfg, 8, 128, ranks, needed + 1, "a host") is None
        finding = host_memory_finding(cfg, 8, 128, ranks, needed - 1e6, "a host")
        assert (finding.level, finding.key) == ("error", "checkpoint.in_memory_every")
        assert "set it to null" in finding.fix and f"{ranks} ranks" in finding.message
    assert host_memory_per_rank(tiny.config(1), 8, 128) == []
