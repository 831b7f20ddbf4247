"""Contiguous runs of a box, compared with NumPy's slicing of the same box."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.shard import Shard


def box(shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...]) -> Shard:
    return Shard("w", shape, "float32", start, extent, None)


def random_box(chance: random.Random) -> Shard:
    shape = tuple(chance.randint(0, 5) for _ in range(chance.randint(0, 4)))
    start = tuple(chance.randint(0, size) for size in shape)
    extent = tuple(chance.choice([size - first, chance.randint(0, size - first)]) for size, first in zip(shape, start))
    return box(shape, start, extent)


@pytest.mark.parametrize("seed", range(300))
def test_runs_cover_the_box(seed: int) -> None:
    shard = random_box(random.Random(seed))
    everything = np.arange(math.prod(shard.shape))
    slices = tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))
    expected = everything.reshape(shard.shape)[slices].ravel()
    found = np.full(expected.size, -1)
    for offset, local, count in shard.runs():
        assert count > 0
        found[local : local + count] = everything[offset : offset + count]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "shard, runs",
    [
        (box((4, 3, 2), (0, 0, 0), (4, 3, 2)), [(0, 0, 24)]),
        (box((4, 3, 2), (1, 0, 0), (2, 3, 2)), [(6, 0, 12)]),
        (box((4, 3, 2), (1, 1, 0), (2, 2, 2)), [(8, 0, 4), (14, 4, 4)]),
        (box((4, 3), (0, 1), (2, 1)), [(1, 0, 1), (4, 1, 1)]),
        (box((), (), ()), [(0, 0, 1)]),
        (box((4, 0), (0, 0), (4, 0)), []),
    ],
)
def test_runs_are_as_long_as_possible(shard: Shard, runs: list[tuple[int, int, int]]) -> None:
    assert list(shard.runs()) == runs


def test_a_whole_tensor_is_one_shard() -> None:
    torch = pytest.importorskip("torch")
    shard = Shard.whole("w", torch.zeros(3, 2, dtype=torch.bfloat16))
    assert (shard.name, shard.shape, shard.dtype, shard.start) == ("w", (3, 2), "bfloat16", (0, 0))
    assert shard.is_whole and not box((3,), (0,), (2,)).is_whole


@pytest.mark.parametrize(
    "shape, start, extent, reason",
    [
        ((4,), (2,), (3,), "leaves the global shape"),
        ((4,), (-1,), (2,), "leaves the global shape"),
        ((4,), (0,), (-1,), "leaves the global shape"),
        ((4, 4), (0,), (4, 4), "same number of dims"),
    ],
)
def test_a_box_outside_of_the_tensor_is_refused(
    shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"shard of w: .*{reason}"):
        box(shape, start, extent)
