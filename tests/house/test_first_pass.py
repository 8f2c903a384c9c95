"""`make test-gpu FAST=1` leaves out no kind of GPU test. The tests are collected as on a host with four H100s."""

from __future__ import annotations

import pytest
import torch

import first_pass
from runs import ROOT
from sagekernels.call import RECIPES
from sagekernels.launch import TABLE


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


def test_a_third_of_the_cases_touches_everything(passes) -> None:
    whole, first = passes["whole"], passes["first"]
    assert covered(first) == covered(whole)
    assert {item.path for item in first} == set((ROOT / "tests/gpu").glob("test_*.py"))
    assert len(first) < len(whole) / 3


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
