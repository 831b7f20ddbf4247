"""Detection of slow members: noise is not reported, slow members are, even with few to compare with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor.preflight.rates import slow


@pytest.mark.parametrize(
    "rates, named",
    [
        ([], []),
        ([5.0], []),
        ([5.0, 10.0], [0]),
        ([9.0, 10.0], []),
        ([10.0, 10.0, 5.0], [2]),
        ([10.0, 9.5, 10.2, 5.0], [3]),
        ([10.0, 10.0, 5.0, 5.0], [2, 3]),  # half of all
        ([10.0, 5.0, 5.0, 5.0], []),  # 5.0 is the usual rate, and one member is faster
        ([0.0, 10.0, 10.0], [0]),
        ([1.0, 1.0, 1.0, 100.0], []),
    ],
)
def test_slow_members_are_found(rates: list[float], named: list[int]) -> None:
    assert sorted(slow(dict(enumerate(rates)))) == named


def test_the_fraction_of_the_usual_rate_is_returned() -> None:
    assert slow({"a": 4.0, "b": 10.0, "c": 10.0}) == {"a": 0.4}


@given(st.lists(st.floats(0.9, 1.1), max_size=200), st.floats(1e-3, 1e12))
def test_noise_of_ten_percent_is_not_an_outlier(noise: list[float], rate: float) -> None:
    assert slow({number: rate * factor for number, factor in enumerate(noise)}) == {}


@pytest.mark.parametrize("members", [2, 3, 4, 8, 64, 1000])
def test_half_the_rate_is_an_outlier_in_noise_of_five_percent(members: int) -> None:
    rng = random.Random(members)
    for _ in range(50):
        rates = {number: rng.uniform(0.95, 1.05) for number in range(members)}
        rates[1] *= 0.5
        assert list(slow(rates)) == [1]


def test_a_wide_spread_has_no_outlier() -> None:
    rng = random.Random(0)
    assert slow({number: rng.uniform(1, 10) for number in range(100)}) == {}
