"""The choice of an algorithm, a pure function."""

from __future__ import annotations

import pytest

from hpctrain.collectives.select import select
from hpctrain.errors import CommunicationError


@pytest.mark.parametrize(
    "algorithm, in_window, carrier_reduces, chosen",
    [
        ("auto", True, True, "window"),
        ("auto", True, False, "window"),
        ("auto", False, True, "mpi"),
        ("auto", False, False, "direct"),
        ("window", True, False, "window"),
        ("direct", True, True, "direct"),
        ("direct", False, True, "direct"),
        ("mpi", True, True, "mpi"),
        ("mpi", False, False, "mpi"),
    ],
)
def test_what_is_chosen(algorithm: str, in_window: bool, carrier_reduces: bool, chosen: str) -> None:
    assert select(algorithm, in_window=in_window, carrier_reduces=carrier_reduces) == chosen


def test_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(CommunicationError, match="^unknown algorithm 'ring': known are auto, window, mpi, direct$"):
        select("ring", in_window=True, carrier_reduces=True)


def test_window_needs_a_window() -> None:
    with pytest.raises(CommunicationError, match=r"^algorithm window needs a tensor of comm.empty\(\), .*use auto"):
        select("window", in_window=False, carrier_reduces=True)
