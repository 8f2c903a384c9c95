"""Permutations and blends: every window comes once, and every source has its share, whatever their number and size."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagetrain.data import token_files
from sagetrain.data.order import Blend, permute


@settings(max_examples=80)
@given(st.integers(1, 600), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 5, 17])
def test_permute_is_uniform_over_keys(size):
    """Each position lands on each place equally often, and neighbours are not kept together."""
    keys = 4000
    counts = np.zeros((size, size))
    neighbours = 0
    for key in range(keys):
        order = [permute(i, size, key) for i in range(size)]
        counts[np.arange(size), order] += 1
        neighbours += sum(b == a + 1 for a, b in pairwise(order))
    sigma = (keys / size * (1 - 1 / size)) ** 0.5
    assert np.abs(counts - keys / size).max() < 6 * sigma
    expected = keys * (size - 1) / size  # A random order has this many successive pairs.
    assert abs(neighbours - expected) < 0.2 * expected


def test_permute_on_a_huge_range():
    size = 10**13 + 37
    places = [permute(i, size, 5) for i in range(3000)]
    assert len(set(places)) == 3000
    assert 0.47 < np.mean(places) / size < 0.53
    assert abs(np.corrcoef(np.arange(3000), places)[0, 1]) < 0.08


def drawn(blend: Blend, count: int, first: int = 0) -> np.ndarray:
    """Return the (source, rank) pairs of `count` samples, int [count, 2]."""
    return np.array([blend.locate(index) for index in range(first, first + count)])


MIXES = [[1], [1, 1], [0.5, 0.3, 0.2], [3.3] * 7, [1, 1e-5], [0.6, 0.3, 0.1, 1e-5, 3e-5], [1 / k for k in range(1, 60)]]


@pytest.mark.parametrize("weights", MIXES)
def test_every_source_has_its_share_at_any_point(weights):
    count = 150_000 if min(weights) < 1e-4 else 20_000
    sources, ranks = drawn(Blend(weights), count).T
    share = np.array(weights) / sum(weights)
    for source in range(len(weights)):
        used = np.cumsum(sources == source)
        assert ranks[sources == source].tolist() == list(range(used[-1]))
        off = np.abs(used - share[source] * np.arange(1, count + 1)).max()
        assert off <= (1 if share[source] < 1e-3 else 1.25), (source, off)


def test_a_small_share_is_exact_late_in_a_long_run():
    """A source has a share of 1e-5, and 10 million samples are drawn after 10**12. A pattern of slots would keep the
    share to 1 % only, which is 100,000 samples there."""
    blend = Blend([1 - 1e-5, 1e-5])
    step, first = 100_000, 10**12
    ranks = []
    for start in range(first, first + 100 * step, step):
        near = range(start - 2, start + step + 2)
        low, high = near[0], near[-1]
        # The rank of the small source grows by one, from its share at one end to its share at the other.
        before = [blend.locate(low)[1] if blend.locate(low)[0] == 1 else low - blend.locate(low)[1]]
        after = [high - blend.locate(high)[1] if blend.locate(high)[0] == 0 else blend.locate(high)[1]]
        ranks += [before[0] - low * 1e-5, after[0] - high * 1e-5]
    assert np.abs(ranks).max() <= 1


def test_thousands_of_sources():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 1000, 3000).tolist()
    blend, count = Blend(weights), 24_000
    used = np.bincount(drawn(blend, count, 10**9)[:, 0], minlength=3000)
    assert np.abs(used - count * np.array(weights) / sum(weights)).max() <= 3  # Both ends may be off by a sample.
    assert Blend([0.5, 0.3, 0.2]).shares == Blend([5, 3, 2]).shares == [5, 3, 2]


def test_a_file_without_text_takes_no_window_from_others(monkeypatch):
    sizes = {"a": 417, "empty": 0, "b": 33}
    monkeypatch.setattr(token_files, "TokenFile", lambda path: SimpleNamespace(num_tokens=sizes[path], path=path))
    files = token_files.TokenFiles(SimpleNamespace(weight=1.0, path="*", files=[*sizes]), 4)
    assert files.num_windows == 104 + 8
    assert [(files.window(number)[0].path, files.window(number)[1]) for number in (103, 104, 111)] == [
        ("a", 103), ("b", 0), ("b", 7),
    ]  # fmt: skip
