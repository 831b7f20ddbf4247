"""Clock offsets from round trips: as exact as the fastest answer allows."""

from __future__ import annotations

import random

import pytest

from hpctrain.comm.composite import offset


def test_the_error_of_an_offset_is_within_its_bound() -> None:
    rng = random.Random(1)
    for _ in range(200):
        ahead = rng.uniform(-5, 5)
        samples = []
        for _ in range(10):
            sent, there, back = 100.0, rng.uniform(0, 1e-2), rng.uniform(0, 1e-2)
            samples.append((sent, sent + there + ahead, sent + there + back))
        found, within = offset(samples)
        assert abs(found - ahead) <= within + 1e-12


def test_the_fastest_round_trip_counts() -> None:
    found, within = offset([(0.0, 9.0, 4.0), (10.0, 13.1, 10.2), (20.0, 29.0, 28.0)])
    assert found == pytest.approx(3.0) and within == pytest.approx(0.1)
