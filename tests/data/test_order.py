"""Order of samples: a function of seed and position; an epoch contains every sample once."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data.loader import SampleOrder
from hpctrain.errors import SettingsError


@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_every_epoch_holds_every_sample_once(length: int) -> None:
    order = SampleOrder(length, seed=3)
    epochs = [order.indices(epoch * length, length) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length == 100:
        assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("start, count", [(0, 0), (0, 3), (5, 4), (6, 1), (7, 7), (3, 30), (1_000_000, 5)])
def test_any_range_equals_that_of_the_whole_sequence(start: int, count: int) -> None:
    expected = []
    for position in range(start, start + count):
        generator = np.random.Generator(np.random.PCG64([11, position // 7]))
        expected.append(generator.permutation(7)[position % 7])
    used = SampleOrder(7, seed=11)
    used.indices(40, 9)  # earlier calls must not matter
    assert used.indices(start, count).tolist() == expected
    assert SampleOrder(7, seed=11).indices(start, count).dtype == np.int64


def test_the_order_does_not_change_between_versions() -> None:
    # A resumed run must continue the order of its first part: a NumPy that shuffles differently fails here.
    golden = [4, 6, 2, 7, 3, 5, 9, 0, 8, 1] + [9, 1, 3, 8, 7, 6, 0, 4, 2, 5]
    assert SampleOrder(10, seed=0).indices(0, 20).tolist() == golden
    assert SampleOrder(10, seed=1).indices(0, 10).tolist() != golden[:10]


@pytest.mark.parametrize("length, seed", [(0, 0), (-1, 0), (5, -1)])
def test_invalid_arguments_are_refused(length: int, seed: int) -> None:
    with pytest.raises(SettingsError, match=f"order of {length} samples with seed {seed}"):
        SampleOrder(length, seed)
