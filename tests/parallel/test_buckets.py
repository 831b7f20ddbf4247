"""Grouping and layout of gradients in buckets: pure functions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from hpctrain.parallel.buckets import assign_buckets, make_buckets, memory_needed

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def some_parameters(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    numbers = random.Random(seed)
    shapes = [[numbers.choice((0, 1, 3, 16, 17, 40)) for _ in range(numbers.choice((0, 1, 2)))] for _ in range(12)]
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def some_groups(seed: int, count: int) -> list[list[int]]:
    numbers = random.Random(seed)
    order, groups = numbers.sample(range(count), count), []
    while order:
        cut = numbers.randint(1, len(order))
        groups.append(order[:cut])
        order = order[cut:]
    return groups


def test_the_first_bucket_is_filled_less() -> None:
    assert assign_buckets([4, 4, 4, 4, 4], [0, 1, 2, 3, 4], first=4, limit=8) == [[0], [1, 2], [3, 4]]
    assert assign_buckets([3, 3, 3, 3], [3, 1, 0, 2], first=6, limit=7) == [[3, 1], [0, 2]]
    assert assign_buckets([], [], 1, 1) == []


def test_a_too_large_parameter_gets_its_own_bucket() -> None:
    assert assign_buckets([1, 100, 1, 1], [0, 1, 2, 3], first=2, limit=4) == [[0], [1], [2, 3]]
    assert assign_buckets([5, 5], [1, 0], first=0, limit=0) == [[1], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_keep_the_order_and_the_limits(seed: int) -> None:
    numbers = random.Random(seed)
    sizes = [numbers.randint(1, 30) for _ in range(15)]
    order = numbers.sample(range(15), 15)
    groups = assign_buckets(sizes, order, first=20, limit=50)
    assert [number for members in groups for number in members] == order
    for position, members in enumerate(groups):
        assert len(members) == 1 or sum(sizes[number] for number in members) <= (50 if position else 20)
    # No two neighbouring buckets would fit into one.
    for here, there in zip(groups[1:], groups[2:]):
        assert sum(sizes[number] for number in here) + sizes[there[0]] > 50


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_any_grouping_fits_into_the_memory(seed: int, dtype: torch.dtype) -> None:
    parameters = some_parameters(seed, dtype)
    memory = torch.full((memory_needed(parameters, dtype),), torch.nan, dtype=dtype)
    groups = some_groups(seed, len(parameters))
    buckets = make_buckets(memory, parameters, groups)
    assert [bucket.members for bucket in buckets] == groups
    owner = torch.full((memory.numel(),), -1)
    for bucket in buckets:
        assert torch.isfinite(bucket.flat).all() and bucket.flat.isfinite().all()
        places = [(view, number) for number, view in zip(bucket.members, bucket.views)] + [(bucket.flags, 99)]
        for view, number in places:
            start = (view.data_ptr() - memory.data_ptr()) // dtype.itemsize if view.numel() else 0
            assert (owner[start : start + view.numel()] == -1).all(), "gradients overlap"
            owner[start : start + view.numel()] = number
            assert number == 99 or (view.shape == parameters[number].shape and view.is_contiguous())
            assert number == 99 or start * dtype.itemsize % 64 == 0
        assert bucket.flags.tolist() == [1] * len(bucket.members)
        assert bucket.flat.numel() * dtype.itemsize % 64 == 0


def test_missing_gradients_are_copied_or_zero() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    bucket = make_buckets(torch.empty(memory_needed(parameters, torch.float32)), parameters, [[3, 1, 0, 2]])[0]
    bucket.views[0].fill_(5)
    bucket.missing.discard(3)
    bucket.views[3].fill_(7)
    elsewhere, in_place = torch.full((3,), 6.0), bucket.views[3]
    assert bucket.fill_missing([None, elsewhere, in_place, None], scale=0.5) == {0}
    assert [view[0].item() for view in bucket.views] == [5, 3, 0, 3.5]  # earlier gradients are unchanged
    assert bucket.flags.tolist() == [1, 1, 0, 1] and not bucket.missing
    bucket.reset()
    assert bucket.flags.tolist() == [1] * 4 and bucket.missing == {0, 1, 2, 3}
