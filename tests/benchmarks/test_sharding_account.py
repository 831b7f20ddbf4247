"""Sums of the ranks' memory."""

from __future__ import annotations

from typing import Any

import pytest
from sharding.account import account
from sharding.addresses import Extent, Resident
from sharding.holdings import Held
from sharding.names import ACTIVATIONS, GRADIENTS, KINDS, PARAMETERS, REST, STATES
from sharding.watch import Sample

WHOLE = ("0:1 7", 0, 100)


def sample(moment: str, total: int, **held: tuple[int, list[Extent]]) -> Sample:
    kinds: dict[str, Any] = dict.fromkeys(KINDS, Held())
    kinds.update({kind: Held(own, tuple(shared)) for kind, (own, shared) in held.items()})
    return Sample(moment, Resident(total, 0), kinds)


def test_node_memory_counts_once_and_each_rank_has_its_part() -> None:
    found = account([[sample("a", 90, parameters=(5, [WHOLE]))], [sample("a", 70, parameters=(7, [WHOLE]))]], [10, 10])
    assert found["node"] == {PARAMETERS: 112, GRADIENTS: 0, STATES: 0, ACTIVATIONS: 0, REST: 28, "total": 140}
    assert found["rank"] == {PARAMETERS: 55, GRADIENTS: 0, STATES: 0, ACTIVATIONS: 0, REST: 25, "total": 80}


def test_separate_memory_adds_up() -> None:
    ranks = [[sample("a", 200, gradients=(0, [("0:1 7", begin, begin + 50)]))] for begin in (0, 50)]
    assert account(ranks, [0, 0])["node"][GRADIENTS] == 100


def test_memory_of_parameters_does_not_count_for_gradients() -> None:
    one = sample("a", 200, parameters=(0, [WHOLE]), gradients=(1, [("0:1 7", 80, 120)]))
    assert account([[one]], [0])["node"][GRADIENTS] == 21


def test_the_peak_is_at_one_moment_and_the_maximum_of_each_kind_at_its_own() -> None:
    ranks = [
        [sample("forward", 100, activations=(60, [])), sample("backward", 150, gradients=(80, []))],
        [sample("forward", 170, activations=(70, [])), sample("backward", 130, gradients=(90, []))],
    ]
    found = account(ranks, [0, 0])
    assert (found["moment"], found["samples"]) == ("backward", 2)
    assert found["node"]["total"] == 280 and found["node"][GRADIENTS] == 170 and found["node"][ACTIVATIONS] == 0
    assert found["rank"]["total"] == 170 and found["rank"][ACTIVATIONS] == 70  # the other rank, at another moment
    assert found["most"][ACTIVATIONS] == {"node": 130, "rank": 70}
    assert found["most"][GRADIENTS] == {"node": 170, "rank": 90}


def test_samples_of_different_moments_are_not_added_up() -> None:
    with pytest.raises(AssertionError):
        account([[sample("forward", 1)], [sample("backward", 1)]], [0, 0])
    with pytest.raises(ValueError):
        account([[sample("forward", 1)], []], [0, 0])
