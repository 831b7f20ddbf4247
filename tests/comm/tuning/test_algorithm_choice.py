"""Selection of an algorithm, a pure function."""

from __future__ import annotations

from math import inf

import pytest

from hpctrain.comm.prepared import ALGORITHMS, check_known, choose
from hpctrain.comm.tuning.table import OPERATIONS, AlgorithmTable, RankLayout, default_table
from hpctrain.errors import CommunicationError

PAIR = RankLayout(2, 1, 2)
ABLE = {"mpi": "", "tree": "", "ring": ""}


def table(*steps: tuple[float, str]) -> AlgorithmTable:
    return AlgorithmTable(PAIR, {("broadcast", "host", "carried"): steps})


def test_a_named_algorithm_is_selected() -> None:
    assert choose("broadcast", "tree", ABLE, (table((inf, "ring")),)) == "tree"


def test_auto_looks_up_the_tables_in_order() -> None:
    measured, default = table((1000, "ring"), (inf, "tree")), table((inf, "mpi"))
    assert choose("broadcast", "auto", ABLE, (measured, default), nbytes=1000) == "ring"
    assert choose("broadcast", "auto", ABLE, (measured, default), nbytes=1001) == "tree"
    assert choose("broadcast", "auto", ABLE, (default, measured), nbytes=1000) == "mpi"
    assert choose("broadcast", "auto", ABLE, (measured, default), location="window") == "mpi"


def test_auto_ignores_algorithms_that_do_not_support_the_call() -> None:
    tables = table((inf, "ring")), table((inf, "tree"))
    assert choose("broadcast", "auto", {**ABLE, "ring": "broken"}, tables) == "tree"
    assert choose("broadcast", "auto", {**ABLE, "mpi": "no"}) == "tree"
    with pytest.raises(
        CommunicationError, match="no algorithm supports broadcast of this tensor: mpi: no; tree: never"
    ):
        choose("broadcast", "auto", {"mpi": "no", "tree": "never"})


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    message = "^unknown algorithm 'star' of reduce: known are auto, double_tree, mpi, tree, window$"
    with pytest.raises(CommunicationError, match=message):
        choose("reduce", "star", ABLE)
    with pytest.raises(CommunicationError, match=message):
        check_known("reduce", "star")


def test_an_unsupported_algorithm_names_the_reason_and_the_supported_ones() -> None:
    with pytest.raises(CommunicationError) as caught:
        choose("broadcast", "window", {**ABLE, "window": "it needs a tensor of comm.empty()"})
    assert str(caught.value) == (
        "algorithm window cannot do this broadcast: it needs a tensor of comm.empty(); able are auto, mpi, ring, tree"
    )


@pytest.mark.parametrize("layout", [PAIR, RankLayout(4, 2, 2), RankLayout(3, 3, 1)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_calibration_every_operation_has_an_algorithm(layout: RankLayout, operation: str) -> None:
    others = ("window", "hierarchical", "mpi")
    by_messages = {name: "no" if name in others else "" for name in ALGORITHMS[operation]}
    for location in ("window", "host"):
        for nbytes in (0, 4, 2**16, 2**33):
            chosen = choose(
                operation, "auto", by_messages, (default_table(layout),), location=location, kind="own", nbytes=nbytes
            )
            assert by_messages[chosen] == ""


def test_defaults_use_node_memory_for_large_tensors() -> None:
    everything = dict.fromkeys(ALGORITHMS["all_reduce"], "")
    for layout, wanted in ((PAIR, "window"), (RankLayout(4, 2, 2), "hierarchical")):
        tables = (default_table(layout),)
        assert choose("all_reduce", "auto", everything, tables, location="window", nbytes=2**20) == wanted
        assert choose("all_reduce", "auto", everything, tables, location="window", nbytes=4) == "mpi"
        assert choose("all_reduce", "auto", everything, tables, location="window", kind="own", nbytes=4) == wanted
