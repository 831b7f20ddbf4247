"""The choice of an algorithm, a pure function."""

from __future__ import annotations

import pytest

from hpctrain.collectives.select import choose, uses_window
from hpctrain.errors import CommunicationError


def test_auto_is_the_default_and_a_name_is_itself() -> None:
    assert choose("broadcast", "auto", ("tree", "mpi"), "mpi") == "mpi"
    assert choose("broadcast", "tree", ("tree", "mpi"), "mpi") == "tree"


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(CommunicationError, match="^unknown algorithm 'star' of broadcast: known are auto, mpi, tree$"):
        choose("broadcast", "star", ("tree", "mpi"), "mpi")


@pytest.mark.parametrize(
    "algorithm, in_window, used",
    [
        ("auto", True, True),
        ("auto", False, False),
        ("window", True, True),
        ("mpi", True, False),
        ("ring", False, False),
    ],
)
def test_where_the_window_serves(algorithm: str, in_window: bool, used: bool) -> None:
    assert uses_window(algorithm, in_window=in_window) is used


def test_window_needs_a_window() -> None:
    with pytest.raises(CommunicationError, match=r"^algorithm window needs a tensor of comm.empty\(\), .*use auto"):
        uses_window("window", in_window=False)
