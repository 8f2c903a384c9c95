"""Permutations and blends: every window once, every source by its share, whatever their number and size."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagetrain.config import ConfigError
from sagetrain.data.order import COARSE_SLOTS, blend_pattern, blend_slots, permute


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
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
    expected = keys * (size - 1) / size  # successive pairs of a random order
    assert abs(neighbours - expected) < 0.2 * expected


def test_permute_on_a_huge_range():
    size = 10**13 + 37
    places = [permute(i, size, 5) for i in range(3000)]
    assert len(set(places)) == 3000
    assert 0.47 < np.mean(places) / size < 0.53
    assert abs(np.corrcoef(np.arange(3000), places)[0, 1]) < 0.08


SMALL = [[1.5 / COARSE_SLOTS, 1], [2e-3, 1, 7], [1e-4, 1], [1] * 5000]


@pytest.mark.parametrize("weights", [[1], [1, 1], [0.5, 0.3, 0.2], [3.3] * 7, [1 / COARSE_SLOTS, 1], *SMALL])
def test_blend_is_exact_and_even(weights):
    slots = blend_slots(weights, [""] * len(weights))
    share, total = np.array(weights) / sum(weights), sum(slots)
    assert (total == COARSE_SLOTS) == (weights not in SMALL)  # the order of runs that had the right shares
    assert np.abs(np.array(slots) / total / share - 1).max() <= 0.01
    pattern, ranks = blend_pattern(slots)
    assert len(pattern) == total
    for source in range(0, len(slots), max(1, len(slots) // 20)):
        used = np.cumsum(pattern == source)
        assert used[-1] == slots[source]
        assert ranks[pattern == source].tolist() == list(range(slots[source]))
        fair = np.arange(1, total + 1) * slots[source] / total
        assert np.abs(used - fair).max() <= max(1, len(weights) / 2)


def test_blend_refuses_a_vanishing_weight():
    with pytest.raises(ConfigError, match=r"data source b: weight 1e-06 of 1 is a share of 1\.0e-06, too small"):
        blend_slots([1, 1e-6], ["a", "b"])
