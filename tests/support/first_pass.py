"""A pytest plugin (-p first_pass) that runs only a few cases of every test, so that each value of each parameter is
covered.

If a test has a parameter `backend`, every value of the other parameters is covered for each backend, because each
backend has kernels of its own. A Shape counts by the properties that choose a kernel or a branch in it. The choice of
cases follows from the parameters alone: a new kernel, recipe or head_dim is in the first pass without being named here.
Tests that are marked `long` take more than half a minute by their nature and are left to the whole suite.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from sagekernels.pieces import block_d
from sagekernels.testing import Shape

Aspect = tuple[str, str, str]


def aspects(item: pytest.Item) -> set[Aspect]:
    """Return the (backend, parameter, value) triples that a case covers; ("", "", "") for a test without parameters."""
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    backend = str(parameters.pop("backend", ""))
    found = {(backend, "", "")}
    for name, value in parameters.items():
        parts = shape_parts(value) if isinstance(value, Shape) else {name: value}
        found |= {(backend, part, str(x)) for part, x in parts.items()}
    return found


def shape_parts(shape: Shape) -> dict[str, object]:
    return {
        "head_dim": (held := block_d(shape.head_dim), held == shape.head_dim),
        # Kernels know whether the sequence has bounds, and the host makes the bounds.
        "mask": (shape.causal, bool(shape.documents)),
        "bounds": (bool(shape.documents), bool(shape.window)),
        "shared keys": shape.heads != shape.kv_heads,
        "lengths differ": shape.n_q != shape.n_k,
    }


def chosen(cases: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Choose cases of one test that cover all its aspects. Each step takes the case that adds most and repeats least.
    In the end cases are dropped if the others cover all their aspects."""
    aspects_of = {case: aspects(case) for case in cases}
    missing, times, taken = set().union(*aspects_of.values()), Counter(), []
    while missing:
        gain = {case: (len(has & missing), -sum(times[aspect] for aspect in has)) for case, has in aspects_of.items()}
        best = max(gain, key=gain.get)
        taken.append(best)
        missing -= aspects_of[best]
        times.update(aspects_of[best])
    for case in list(taken):
        if all(times[aspect] > 1 for aspect in aspects_of[case]):
            taken.remove(case)
            times.subtract(aspects_of[case])
    return taken


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    keep = {id(case) for cases in by_test.values() for case in chosen(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in keep])
    items[:] = [item for item in items if id(item) in keep]
