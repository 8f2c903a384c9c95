"""`make test-gpu FAST=1` leaves out no kind of GPU test. The tests are collected as on a host with four H100s."""

import importlib.util
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import first_pass
import side_by_side
from forked import PATIENCE, Command
from kernel_inputs import call_of
from runs import ROOT
from sagekernels.backends import HOPPER, TRITON
from sagekernels.call import RECIPES
from sagekernels.launch import TABLE
from sagekernels.testing import Shape, random_inputs


class Collected:
    """A pytest plugin that keeps the collected tests."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


@pytest.fixture(scope="module")
def passes() -> dict[str, list[pytest.Item]]:
    """The cases of the whole run and of the first pass."""
    kept = Collected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        options = ["-qq", "--collect-only", "--noconftest", "-p", "no:cacheprovider", str(ROOT / "tests/gpu")]
        assert pytest.main(options, plugins=[kept]) == 0
    first = [*kept.items]
    first_pass.pytest_collection_modifyitems(first[0].config, first)
    return {"whole": kept.items, "first": first}


def covered(items: list[pytest.Item]) -> set[tuple]:
    return {(item.nodeid.split("[")[0], aspect) for item in items for aspect in first_pass.aspects(item)}


def test_a_quarter_of_the_cases_touches_all_that_is_not_long(passes) -> None:
    whole, first = passes["whole"], passes["first"]
    assert {item.path for item in whole} == set((ROOT / "tests/gpu").glob("test_*.py"))
    short = [item for item in whole if item.get_closest_marker("long") is None]
    assert covered(first) == covered(short)
    assert len(first) < len(whole) / 4
    left_out = {item.path for item in whole} - {item.path for item in first}
    assert {path.stem for path in left_out} == {"test_small_card_gpu", "test_stability_gpu"}


def test_the_longest_tests_begin_first() -> None:
    nodeids = [f"tests/gpu/test_x_gpu.py::test_{name}[case]" for name in "abcd"]
    seconds = {"test_x_gpu.py::test_c": 60.0, "test_x_gpu.py::test_d": 30.0, "test_x_gpu.py::test_a": 0.1}
    assert side_by_side.longest_first(nodeids, seconds) == [1, 2, 3, 0]  # No one has timed b.


def test_processes_begin_at_a_gpu_each_and_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "CORES", 64)
    assert [side_by_side.number_of_processes(gpus) for gpus in (4, 1, 0)] == [48, 12, 1]
    visible = [side_by_side.share_of(n, 32, ["4", "5", "6", "7"])["CUDA_VISIBLE_DEVICES"] for n in range(32)]
    assert visible[:5] == ["4,5,6,7", "5,6,7,4", "6,7,4,5", "7,4,5,6", "4,5,6,7"]
    assert Counter(each[0] for each in visible) == dict.fromkeys("4567", 8)


def test_libraries_are_imported_as_if_torchao_were_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao uses a GPU when it is imported, and transformers imports it where it is installed."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").write_text("")
    looks = "from transformers.utils.import_utils import _is_package_available\nsees = _is_package_available('torchao')"
    (tmp_path / "looks_for_torchao.py").write_text(looks)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(side_by_side, "IMPORTED", ["looks_for_torchao", "is_not_installed"])
    side_by_side.import_libraries()
    assert not sys.modules.pop("looks_for_torchao").sees[0]
    assert importlib.util.find_spec("torchao").origin == str(tmp_path / "torchao/__init__.py")
    monkeypatch.setattr(side_by_side, "uses_gpu", lambda: True)
    with pytest.raises(SystemExit, match=r"name that package in HIDDEN, or .* make test-gpu GPU_JOBS=1"):
        side_by_side.import_libraries()


CASES = """
import os, signal, pytest
@pytest.fixture(scope="module")
def made():
    yield os.getpid()
@pytest.mark.parametrize("number", range(4))
def test_it(number, made):
    assert number != 2 and made == os.getpid()
def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_share_the_tests_and_one_may_die(tmp_path: Path) -> None:
    for name in ("gpu", "support"):
        (tmp_path / "tests" / name).mkdir(parents=True)
    for name in ("side_by_side", "gpu_seen"):
        shutil.copy(ROOT / f"tests/support/{name}.py", tmp_path / "tests/support")
    (tmp_path / "tests/gpu/test_x_gpu.py").write_text(CASES)
    start = f"import sys; sys.path.insert(0, {str(tmp_path / 'tests/support')!r})"
    start += "\nfor name in ('side_by_side', 'gpu_seen'): sys.modules.pop(name, 0)"  # The server has this checkout's.
    start += "\nimport side_by_side as s; s.IMPORTED = []; sys.exit(s.main(sys.argv[1:]))"
    (tmp_path / "start.py").write_text(start)
    words = ["start.py", "--processes", "2", "-q", "--noconftest", "--rootdir", ".", "tests/gpu"]
    env = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}  # pytest removes old folders that are beside its own.
    command = Command(["python", *words], env, tmp_path / "log", tmp_path)
    assert command.wait(PATIENCE) == 1, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "2 failed, 3 passed" in said and "the process has died" in said
    last = json.loads((tmp_path / "tests/gpu/seen.json").read_text())["last"]
    assert last["failures"] == ["test_x_gpu.py::test_it[2]", "test_x_gpu.py::test_killed"]
    assert last["files"] == {"test_x_gpu.py": {"passed": 3, "failed": 2, "skipped": 0, "not run": 0}}


SESSION = """
@pytest.fixture(scope="session", autouse=True)
def folder(tmp_path_factory):
    yield tmp_path_factory.getbasetemp()
    open(f"{os.environ['PIDS']}/ended/{os.getpid()}", "w").close()
def test_last(folder, capsys):
    open(f"{os.environ['PIDS']}/last/{os.getpid()}", "w").close()
    print("said")
    assert folder.name.startswith("worker-") and capsys.readouterr().out == "said\\n"
"""


def test_workers_take_files_and_one_may_die(tmp_path: Path) -> None:
    """The tests of a file share a process, but for those behind one that has killed it. Fixtures of the session end."""
    for name in "xy":
        (tmp_path / f"test_{name}.py").write_text(CASES + SESSION)
    last, ended = tmp_path / "last", tmp_path / "ended"
    last.mkdir(), ended.mkdir()
    (tmp_path / "start.py").write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))")
    words = ["start.py", "-p", "workers", "--workers", "2", "-q", "--noconftest", "test_x.py", "test_y.py"]
    env = {**os.environ, "PIDS": str(tmp_path), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    command = Command(["python", *words], env, tmp_path / "log", tmp_path)
    assert command.wait(PATIENCE) == 1, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "4 failed, 8 passed" in said and "the process has died: exit code -9" in said
    # Two processes were killed. One or two took their places and ran the last test of each file.
    assert sorted(os.listdir(ended)) == sorted(os.listdir(last))


def test_every_fixture_is_there_without_the_conftest(passes) -> None:
    """`make test-gpu` runs without the conftest, which needs packages that hosts with GPUs lack."""
    for item in passes["whole"]:
        assert set(item.fixturenames) <= {"request", *item._fixtureinfo.name2fixturedefs}, item.nodeid


def test_backends_run_every_recipe_and_head_dim_they_have(passes) -> None:
    """The library's own tables say what must run, not the names in tests. Each case computes output and gradients. The
    backend of other GPUs is in test_mma_gpu.py, and here in the whole run."""
    accuracy = [item for item in passes["first"] if item.originalname == "test_agrees_with_the_twin_and_with_float64"]
    cases = [item.callspec.params for item in accuracy if item.path.stem == "test_sage_gpu"]
    assert {case["backend"] for case in cases} == {"triton", "hopper"}
    for backend in (TRITON, HOPPER):
        of_backend = [case for case in cases if case["backend"] == backend.name]
        q, k, v, _ = random_inputs(Shape(), dtype=torch.bfloat16)
        recipes = {recipe for recipe in RECIPES if backend.takes(call_of(Shape(), q, k, v, recipe))}
        assert {case["recipe"] for case in of_backend} == recipes
        held = set().union(*(tiles for kernel in TABLE.values() for tiles in kernel.values()))
        assert {case["shape"].head_dim for case in of_backend} >= held.intersection(backend.head_dims)
        assert {(case["shape"].causal, bool(case["shape"].documents)) for case in of_backend} == {
            (causal, packed) for causal in (True, False) for packed in (True, False)
        }
