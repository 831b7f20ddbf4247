"""Bandwidths as in nccl-tests: its doc/PERFORMANCE.md derives the factors, these tests count them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from comm.bandwidth import FACTORS, algorithm_bandwidth, bus_bandwidth

RANKS = (2, 3, 4, 8, 9)


def busiest_link(operation: str, ranks: int) -> Fraction:
    """Return the share of the whole tensor that the busiest rank of a ring sends, counted step by step."""
    share = Fraction(1, ranks)
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if operation in rounds:  # in each round every rank sends one share to its neighbour, ranks - 1 times
        return sum((share for _ in range(rounds[operation] * (ranks - 1))), Fraction(0))
    return Fraction(1)  # the root, or the sender, sends the whole tensor once


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("operation", FACTORS)
def test_bus_bandwidth_counts_the_bytes_of_the_busiest_rank(operation: str, ranks: int) -> None:
    assert FACTORS[operation](ranks) == pytest.approx(float(busiest_link(operation, ranks)))


@pytest.mark.parametrize(
    "operation, ranks, busbw",
    [
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("all_reduce", 2, 1.0),
        ("pingpong", 2, 1.0),
    ],
)
def test_a_gigabyte_in_a_second_is_1_gb_per_s(operation: str, ranks: int, busbw: float) -> None:
    assert algorithm_bandwidth(10**9, 1.0) == 1.0  # of 10^9 bytes, not 2^30
    assert bus_bandwidth(operation, 10**9, 1.0, ranks) == pytest.approx(busbw)
    assert bus_bandwidth(operation, 10**9, 0.5, ranks) == pytest.approx(2 * busbw)
