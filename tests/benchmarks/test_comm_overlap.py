from __future__ import annotations

import pytest
from comm.overlap import overlap_percent


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
