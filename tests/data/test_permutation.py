"""Permutations that are computed where they are needed: each number once, without visible order, in no memory."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from hpctrain.data.orders import IndexPermutation, SampleOrder


@pytest.mark.parametrize("length", (1, 2, 3, 5, 16, 17, 63, 1000, 4097))
def test_each_number_comes_once(length: int) -> None:
    found = [IndexPermutation(length, 7, epoch)(np.arange(length)).tolist() for epoch in (0, 1)]
    assert all(sorted(each) == list(range(length)) for each in found)
    assert length < 16 or found[0] != found[1]


def test_it_looks_like_a_random_permutation() -> None:
    """As many pairs of cells, fixed points and neighbours as chance makes."""
    length, cells = 200_000, 40
    for seed in range(3):
        found = IndexPermutation(length, seed, 0)(np.arange(length))
        assert len(np.unique(found)) == length
        counts = np.histogram2d(np.arange(length), found, bins=cells)[0]
        expected = length / cells**2
        chi2 = ((counts - expected) ** 2 / expected).sum()
        degrees = (cells - 1) ** 2
        assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 5 / np.sqrt(length)
        assert (found == np.arange(length)).sum() < 10 and (np.diff(found) == 1).sum() < 10


def test_an_order_of_many_samples_needs_neither_time_nor_memory() -> None:
    order = SampleOrder(10**9, 3)
    tracemalloc.start()
    began = time.process_time()
    found = order.indices(7 * 10**9 + 123_456_789, 1000)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1 and peak < 1 << 20
    assert len(np.unique(found)) == 1000 and 0 <= found.min() and found.max() < 10**9
    assert np.array_equal(found[200:], SampleOrder(10**9, 3).indices(7 * 10**9 + 123_456_989, 800))


class ComputedOrder(SampleOrder):
    most_held = 5


def test_both_kinds_of_orders_cross_epochs() -> None:
    for order in (SampleOrder(10, 1), ComputedOrder(10, 1)):
        whole = order.indices(0, 30).reshape(3, 10)
        assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in whole)
        assert np.array_equal(order.indices(7, 16), whole.flatten()[7:23])
