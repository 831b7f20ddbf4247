"""Batches of similar lengths: every sample once per epoch, little padding, direct access to any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.data import LengthBatches
from hpctrain.errors import DataError, SettingsError, UsageError

LENGTHS = np.random.default_rng(0).integers(1, 100, 1003)


def padding(batches: list[list[int]]) -> float:
    whole = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    return whole / int(LENGTHS[[index for batch in batches for index in batch]].sum())


@pytest.mark.parametrize("options", [{}, {"most": 900}, {"shuffle": False}, {"window": 3}, {"most": 150, "window": 2}])
def test_every_sample_comes_once_with_little_padding(options: dict[str, Any]) -> None:
    order = LengthBatches(LENGTHS, 16, seed=4, **options)
    for epoch in (0, 1):
        order.set_epoch(epoch)
        batches = list(order)
        assert len(batches) == len(order)
        assert sorted(index for batch in batches for index in batch) == list(range(1003))
        assert max(map(len, batches)) <= 16
        if most := options.get("most"):
            assert max(len(batch) * int(LENGTHS[batch].max()) for batch in batches) <= most
        assert padding(batches) < (1.12 if options.get("window", 64) > 3 else 1.5)
        for number in (1, len(batches) // 2, len(batches) - 1, len(batches)):
            assert list(order.start_at(number)) == batches[number:]


def test_epochs_and_seeds_have_their_own_orders() -> None:
    first, other = LengthBatches(LENGTHS, 16, seed=1), LengthBatches(LENGTHS, 16, seed=2)
    begin = list(first)
    assert begin == list(LengthBatches(LENGTHS, 16, seed=1)) and begin != list(other)
    first.set_epoch(1)
    assert begin != list(first)
    means = [float(LENGTHS[batch].mean()) for batch in begin]
    assert means != sorted(means)


def test_dropped_samples_are_not_always_the_longest() -> None:
    order, dropped = LengthBatches(LENGTHS, 100, drop_last=True), set[int]()
    for epoch in range(5):
        order.set_epoch(epoch)
        batches = list(order)
        assert len(batches) == len(order) == 10 and all(len(batch) == 100 for batch in batches)
        dropped |= {*range(1003)} - {index for batch in batches for index in batch}
    assert len(dropped) > 9 and LENGTHS[[*dropped]].mean() < 70


def test_loaders_use_it() -> None:
    numbers: Any = list(range(1003))
    with hpctrain.init(device="cpu") as job:
        own = [batch.tolist() for batch in job.loader(numbers_of(numbers), batch=16, lengths=LENGTHS, most=900, seed=4)]
    plain = DataLoader(numbers, batch_sampler=LengthBatches(LENGTHS, 16, most=900, seed=4))  # type: ignore[arg-type]
    assert own == [batch.tolist() for batch in plain]


class numbers_of(list[int]):
    pass


def test_bad_input() -> None:
    with pytest.raises(DataError, match="expected one whole number per sample"):
        LengthBatches([[1]], 2)
    with pytest.raises(DataError, match="expected one whole number per sample"):
        LengthBatches([1.5], 2)
    with pytest.raises(DataError, match="lengths hold -1"):
        LengthBatches([-1, 2], 2)
    with pytest.raises(SettingsError, match="batches of 0 samples"):
        LengthBatches([1], 0)
    with pytest.raises(DataError, match=r"sample 1 has the length 9, more than the 8 of a whole batch"):
        LengthBatches([1, 9], 2, most=8)
    with hpctrain.init(device="cpu") as job:
        with pytest.raises(DataError, match="has 2 lengths for 3 samples"):
            job.loader(numbers_of([1, 2, 3]), batch=2, lengths=[1, 2])
        with pytest.raises(UsageError, match=r"most=5\): needs lengths"):
            job.loader(numbers_of([1, 2, 3]), batch=2, most=5)
