"""`make test-gpu FAST=1` leaves out no kind of GPU test. The tests are collected as on a host with four H100s."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import first_pass
import side_by_side
from runs import ROOT
from sagekernels.call import RECIPES
from sagekernels.launch import TABLE
from side_by_side import dealt, share_of


class Collected:
    """A pytest plugin that keeps the collected tests."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


@pytest.fixture(scope="module")
def passes() -> dict[str, list[pytest.Item]]:
    """The cases of the whole run and of the first pass."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        for name, plugins in (("whole", []), ("first", [first_pass])):
            kept = Collected()
            options = ["-qq", "--collect-only", "--noconftest", "-p", "no:cacheprovider", str(ROOT / "tests/gpu")]
            assert pytest.main(options, plugins=[kept, *plugins]) == 0
            found[name] = kept.items
    return found


def covered(items: list[pytest.Item]) -> set[tuple]:
    return {(item.nodeid.split("[")[0], aspect) for item in items for aspect in first_pass.aspects(item)}


def test_a_third_of_the_cases_touches_all_that_is_not_long(passes) -> None:
    whole, first = passes["whole"], passes["first"]
    assert {item.path for item in whole} == set((ROOT / "tests/gpu").glob("test_*.py"))
    short = [item for item in whole if item.get_closest_marker("long") is None]
    assert covered(first) == covered(short)
    assert len(first) < len(whole) / 3 and len({item.path for item in whole}) - len({item.path for item in first}) <= 2


def test_shares_begin_with_the_longest_tests() -> None:
    """Two processes share five tests as worksteal does it, two and three. A short test waits behind each long one."""
    items = [SimpleNamespace(nodeid=f"tests/gpu/test_x_gpu.py::test_{name}[case]") for name in "abcde"]
    seconds = {"test_x_gpu.py::test_c": 60.0, "test_x_gpu.py::test_e": 30.0, "test_x_gpu.py::test_a": 0.1}
    order = "".join(item.nodeid[-7] for item in dealt(items, seconds, 2))
    assert order == "edcab"  # c 60, e 30, b and d unknown, a 0.1


def test_processes_begin_at_a_gpu_each_and_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "CORES", 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert side_by_side.pytest_xdist_auto_num_workers() == 48
    visible = [share_of(worker, 48, ["4", "5", "6", "7"])["CUDA_VISIBLE_DEVICES"] for worker in range(48)]
    assert visible[:5] == ["4,5,6,7", "5,6,7,4", "6,7,4,5", "7,4,5,6", "4,5,6,7"]
    assert Counter(each[0] for each in visible) == dict.fromkeys("4567", 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert side_by_side.pytest_xdist_auto_num_workers() == 12


def test_every_fixture_is_there_without_the_conftest(passes) -> None:
    """`make test-gpu` runs without the conftest, which needs packages that hosts with GPUs lack."""
    for item in passes["whole"]:
        assert set(item.fixturenames) <= {"request", *item._fixtureinfo.name2fixturedefs}, item.nodeid


def test_both_backends_run_every_recipe_and_head_dim(passes) -> None:
    """The library's own tables say what must run, not the names in tests. Each case computes output and gradients."""
    accuracy = [item for item in passes["first"] if item.originalname == "test_agrees_with_the_twin_and_with_float64"]
    cases = [item.callspec.params for item in accuracy if "backend" in item.callspec.params]
    head_dims = set().union(*(tiles for kernel in TABLE.values() for tiles in kernel.values()))
    for backend in ("triton", "hopper"):
        of_backend = [case for case in cases if case["backend"] == backend]
        assert {case["recipe"] for case in of_backend} == set(RECIPES)
        assert {case["shape"].head_dim for case in of_backend} >= head_dims
        assert {(case["shape"].causal, bool(case["shape"].documents)) for case in of_backend} == {
            (causal, packed) for causal in (True, False) for packed in (True, False)
        }
