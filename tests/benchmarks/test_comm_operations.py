"""Expected results of each operation, written out element by element."""

from __future__ import annotations

import pytest
import torch
from comm.operations import LARGEST, OPERATIONS, PERIOD, values

RANKS = (2, 3, 5)
NUMEL = 30 * 700  # more than two periods, and divisible by every number of ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_gives_the_sum(ranks: int) -> None:
    held = [OPERATIONS["all_reduce"].start(rank, ranks, NUMEL).tolist() for rank in range(ranks)]
    expected = [sum(column) for column in zip(*held)]
    for rank in range(ranks):
        assert OPERATIONS["all_reduce"].end(rank, ranks, NUMEL).tolist() == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_scatter_gives_the_shares_of_the_sum(ranks: int) -> None:
    operation = OPERATIONS["reduce_scatter"]
    held = [operation.start(rank, ranks, NUMEL).tolist() for rank in range(ranks)]
    shares = [operation.end(rank, ranks, NUMEL).tolist() for rank in range(ranks)]
    assert {len(share) for share in shares} == {operation.second(NUMEL, ranks)}
    assert sum(shares, []) == [sum(column) for column in zip(*held)]


@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_gives_the_shares_of_all_ranks(ranks: int) -> None:
    operation, each = OPERATIONS["all_gather"], NUMEL // ranks
    held = [operation.start(rank, ranks, NUMEL).tolist() for rank in range(ranks)]
    expected = [held[place // each][place] for place in range(NUMEL)]
    for rank in range(ranks):
        assert operation.end(rank, ranks, NUMEL).tolist() == expected
        assert held[rank] != expected


@pytest.mark.parametrize("name", ["broadcast", "pingpong"])
def test_broadcast_gives_the_values_of_the_root(name: str) -> None:
    operation = OPERATIONS[name]
    given = operation.start(0, 2, NUMEL)
    assert torch.equal(operation.end(1, 2, NUMEL), given)
    assert not torch.equal(operation.start(1, 2, NUMEL), given)


@pytest.mark.parametrize("ranks", [2, 4, 16, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_every_dtype_represents_the_sums_exactly(ranks: int, dtype: torch.dtype) -> None:
    end = OPERATIONS["all_reduce"].end(0, ranks, PERIOD)
    assert int(end.max()) <= LARGEST
    total = sum(values(rank, ranks, PERIOD).to(dtype) for rank in range(ranks))
    assert torch.equal(torch.as_tensor(total).long(), end.long())


def test_a_block_in_the_wrong_place_is_detected() -> None:
    held = values(0, 2, 2**15)
    for shift in (1, 64, 4096, 2**14):
        assert not torch.equal(held, held.roll(shift))
