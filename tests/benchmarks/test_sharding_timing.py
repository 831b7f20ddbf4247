"""Turns in random order, medians of the slowest rank, and differences of losses."""

from __future__ import annotations

import pytest
from sharding.names import ALONE, DDP, FSDP, TORCH_DDP
from sharding.timing import drifts, orders, summaries


def test_every_round_has_all_candidates_once_in_a_different_order() -> None:
    names = ["a", "b", "c", "d"]
    rounds = list(orders(names, 40))
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 10
    assert {order[0] for order in rounds} == set(names)
    assert rounds == list(orders(names, 40))  # equal on all ranks


def test_the_time_of_a_step_is_that_of_the_slowest_rank() -> None:
    found = summaries([{"a": [1.0, 5.0, 1.0]}, {"a": [2.0, 1.0, 3.0]}])
    assert (found["a"]["min"], found["a"]["median"], found["a"]["max"]) == (2.0, 3.0, 5.0)


def test_the_largest_difference_of_any_rank_and_step_counts() -> None:
    gathered = [
        {TORCH_DDP: [2.0, 1.0], DDP: [2.0, 1.0], FSDP: [2.0, 1.0], ALONE: [2.0, 9.0]},
        {TORCH_DDP: [2.0, 1.0], DDP: [2.0, 1.0], FSDP: [2.1, 1.0], ALONE: [2.0, 9.0]},
    ]
    found = drifts(gathered, TORCH_DDP)
    assert found == {DDP: 0.0, FSDP: pytest.approx(0.05)}  # a candidate that trains alone is not compared
    assert drifts([{DDP: [1.0]}], TORCH_DDP) == {}
