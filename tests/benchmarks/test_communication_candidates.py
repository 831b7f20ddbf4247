"""Candidates of the communication benchmarks: expected results, element by element, and numbers of calls."""

from __future__ import annotations

import pytest
import torch
from communication_candidates import LARGEST, LOOP_CALLS, OPERATIONS, PERIOD, calls_of, elements, values
from communication_overlap import overlap_percent

RANKS = (2, 3, 5)
NUMEL = 30 * 700  # more than two periods, and divisible by every number of ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_equal_those_of_plain_lists(name: str, ranks: int) -> None:
    operation, each = OPERATIONS[name], NUMEL // ranks
    held = [operation.start(rank, ranks, NUMEL).tolist() for rank in range(ranks)]
    total = [sum(column) for column in zip(*held)]
    expected = {
        "all_reduce": [total] * ranks,
        "reduce_scatter": [total[rank * each : (rank + 1) * each] for rank in range(ranks)],
        "all_gather": [[held[place // each][place] for place in range(NUMEL)]] * ranks,
        "broadcast": [held[0]] * ranks,
        "pingpong": [held[0]] * ranks,
    }[name]
    assert [operation.end(rank, ranks, NUMEL).tolist() for rank in range(ranks)] == expected
    assert all(own != expected[rank] for rank, own in enumerate(held) if rank)
    assert operation.second(NUMEL, ranks) == {"reduce_scatter": each, "pingpong": NUMEL}.get(name, 0)


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_numbers_of_elements_are_divisible_and_close_to_the_request(ranks: int, itemsize: int) -> None:
    for nbytes in (1, 4, 1000, 65536):
        numel = elements(nbytes, itemsize, ranks)
        assert numel % ranks == 0 and numel > 0
        assert nbytes - itemsize < numel * itemsize < nbytes + (ranks + 1) * itemsize


def test_small_messages_are_repeated_and_large_ones_are_sent_once() -> None:
    calls = [calls_of(nbytes) for nbytes in (4, 64 * 2**10, 2**20, 4 * 2**20, 25 * 2**20, 2**31)]
    assert calls == sorted(calls, reverse=True)
    assert calls[0] == LOOP_CALLS and calls[-2:] == [1, 1]


@pytest.mark.parametrize(
    "communication, compute, overall, percent",
    [
        (10.0, 10.0, 20.0, 0.0),  # one after the other
        (10.0, 10.0, 10.0, 100.0),  # all of it hidden
        (10.0, 10.0, 12.5, 75.0),
        (10.0, 10.0, 25.0, 0.0),  # never negative
    ],
)
def test_overlap_equals_that_of_osu(communication: float, compute: float, overall: float, percent: float) -> None:
    tests = 3.0  # of OSU's compute time, which contains them
    osu = max(0.0, 100 - (overall - ((compute + tests) - tests)) / communication * 100)
    assert overlap_percent(communication, compute, overall) == pytest.approx(percent) == osu
