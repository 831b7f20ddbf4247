"""Table of the fastest algorithms: its crossovers, its JSON form, and its text in aligned columns."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from hpctrain.comm.tuning.table import AlgorithmTable, Key, RankLayout, describe, fastest, lines, ratios
from hpctrain.errors import SettingsError

LAYOUT = RankLayout(4, 2, 2)
TABLE = AlgorithmTable(
    LAYOUT,
    {
        ("broadcast", "host", "carried"): ((inf, "tree"),),
        ("all_reduce", "window", "carried"): ((128, "mpi"), (2**20, "window"), (inf, "hierarchical")),
        ("all_reduce", "cuda", "own"): ((4096, "staged"), (2**26, "nccl")),
    },
)


def line(alpha: float, beta: float, sizes: range | list[int]) -> dict[int, float]:
    """Return the seconds of an algorithm: alpha, plus beta per byte."""
    return {size: alpha + beta * size for size in sizes}


SIZES = [4**power for power in range(1, 14)]


def test_the_crossover_is_where_the_lines_cross() -> None:
    # 2 us + n ns against 12 us + n/10 ns: equal at 11,111 bytes, between 4 KiB and 16 KiB.
    times = {"mpi": line(2e-6, 1e-9, SIZES), "window": line(12e-6, 1e-10, SIZES)}
    assert fastest(times) == ((8192, "mpi"), (inf, "window"))


def test_three_algorithms_are_selected_in_turn() -> None:
    times = {"mpi": line(1, 1, SIZES), "tree": line(30, 0.1, SIZES), "ring": line(5000, 0.01, SIZES)}
    # 1 + n = 30 + n/10 at 32 bytes; 30 + n/10 = 5000 + n/100 at 55,222.
    assert fastest(times) == ((32, "mpi"), (32768, "tree"), (inf, "ring"))


def test_a_difference_below_the_margin_causes_no_crossover() -> None:
    times = {"mpi": {1: 0.50, 4: 1.02, 16: 2.00}, "tree": {1: 0.90, 4: 1.00, 16: 3.00}}
    assert fastest(times) == ((inf, "mpi"),)
    assert fastest(times, margin=0.01) == ((2, "mpi"), (8, "tree"), (inf, "mpi"))


def test_small_differences_do_not_add_up_to_more_than_the_margin() -> None:
    rising = {size: 1 + 0.001 * number for number, size in enumerate(SIZES)}
    times = {"mpi": {size: seconds * 1.01**number for number, (size, seconds) in enumerate(rising.items())}}
    times["tree"] = {size: seconds * 1.025 for size, seconds in rising.items()}
    table = AlgorithmTable(LAYOUT, {("all_reduce", "host", "carried"): fastest(times)})
    for size in SIZES:
        chosen = table.best("all_reduce", "host", "carried", size)
        assert chosen and times[chosen][size] <= 1.03 * min(of[size] for of in times.values())


@pytest.mark.parametrize("spoiled", SIZES[:-1])
def test_one_disturbed_time_does_not_change_the_table(spoiled: int) -> None:
    times = {"mpi": line(2e-6, 1e-9, SIZES), "window": line(1e-6, 1e-10, SIZES)}
    times["window"][spoiled] = 1.0
    assert fastest(times)[-1] == (inf, "window") and fastest(times)[0][1] == "window"
    assert len(fastest(times)) == 1


def test_an_algorithm_may_support_only_some_sizes() -> None:
    assert fastest({"mpi": line(9, 0, [1, 4, 16]), "tree": {4: 1.0}}) == ((2, "mpi"), (8, "tree"), (inf, "mpi"))


def test_empty_and_single_size_measurements_give_a_table() -> None:
    assert fastest({}) == ()
    assert fastest({"mpi": {64: 0.0}, "tree": {64: 1.0}}) == ((inf, "mpi"),)


@pytest.mark.parametrize(
    "nbytes, name", [(0, "mpi"), (128, "mpi"), (129, "window"), (2**20, "window"), (2**40, "hierarchical")]
)
def test_best_returns_the_fastest_algorithm(nbytes: int, name: str) -> None:
    assert TABLE.best("all_reduce", "window", "carried", nbytes) == name


def test_a_size_that_was_not_measured_has_no_best() -> None:
    assert TABLE.best("all_reduce", "window", "own", 4) is None
    assert TABLE.best("all_reduce", "cuda", "own", 2**26 + 1) is None


@pytest.mark.parametrize(
    "key, text",
    [
        (("all_reduce", "window", "carried"), "mpi up to 128 B, window up to 1 MiB, hierarchical above"),
        (("all_reduce", "cuda", "own"), "staged up to 4 KiB, nccl up to 64 MiB, above not measured"),
        (("broadcast", "host", "carried"), "tree"),
    ],
)
def test_steps_are_described_by_their_limits(key: Key, text: str) -> None:
    assert describe(TABLE.rules[key]) == text


def test_layouts_are_described() -> None:
    assert str(LAYOUT) == "4 ranks on 2 nodes" and str(RankLayout(1, 1, 1)) == "1 rank on 1 node"


def test_a_table_round_trips_through_json() -> None:
    text = json.dumps(TABLE.to_json(), allow_nan=False)
    assert AlgorithmTable.from_json(json.loads(text)) == TABLE


def changed(path: str, value: Any) -> Any:
    """Return the table's JSON with one value replaced; None removes it."""
    tree = json.loads(json.dumps(TABLE.to_json()))
    *way, last = path.split(".")
    node = tree
    for step in way:
        node = node[step]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return tree


RULE = "all_reduce/window/carried"


@pytest.mark.parametrize(
    "tree, message",
    [
        ([], "a calibration table: expected an object, found []"),
        (changed("ruels", {}), "a calibration table: 'ruels' is unknown, its members are layout, rules"),
        (changed("layout", None), "a calibration table: 'layout' is missing"),
        (changed("layout.size", "4"), "size of a layout: expected a whole number from 1 on, found '4'"),
        (changed("layout.nodes", True), "nodes of a layout: expected a whole number"),
        (changed("layout.local_size", 0), "local_size of a layout: expected a whole number from 1 on, found 0"),
        (changed("layout.nodes", 5), "a layout has no 4 ranks on 5 nodes"),
        (changed("rules", []), "rules of a calibration table: expected an object"),
        (changed("rules.all_reduce/window", []), "unknown rule 'all_reduce/window'"),
        (changed("rules.allreduce/window/own", []), "unknown rule 'allreduce/window/own' .* known are all_reduce or"),
        (changed(f"rules.{RULE}", []), rf"rule {RULE} of a calibration table: expected a list of \[bytes, algorithm\]"),
        (changed(f"rules.{RULE}", [7]), r"expected \[bytes, algorithm\], found 7"),
        (changed(f"rules.{RULE}", [[None, "windoww"]]), "unknown algorithm 'windoww', known are mpi, direct"),
        (changed(f"rules.{RULE}", [[None, "nccl"]]), "unknown algorithm 'nccl'"),
        (changed(f"rules.{RULE}", [[None, ["mpi"]]]), "unknown algorithm"),
        (changed(f"rules.{RULE}", [[None, "mpi"], [None, "window"]]), "expected a number of bytes, found None"),
        (changed(f"rules.{RULE}", [["4", "mpi"]]), "expected a number of bytes, or null, found '4'"),
        (changed(f"rules.{RULE}", [[-1, "mpi"]]), "expected a number of bytes"),
        (changed(f"rules.{RULE}", [[8, "mpi"], [8, "window"]]), "bytes must ascend, 8 comes after 8"),
    ],
)
def test_invalid_json_is_refused_in_one_line(tree: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("found []", r"found \[\]")) as caught:
        AlgorithmTable.from_json(tree)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


# Text -----------------------------------------------------------------------------------------------------------------


REPORTED = AlgorithmTable(
    RankLayout(2, 1, 2),
    {
        ("all_reduce", "window", "carried"): ((128, "mpi"), (inf, "window")),
        ("all_reduce", "host", "own"): ((inf, "tree"),),
        ("broadcast", "host", "carried"): ((inf, "mpi"),),
    },
)
TIMES = {
    "all_reduce/window/carried": {"mpi": {"64": 1e-6, "1024": 9e-6}, "window": {"64": 2e-6, "1024": 2e-6}},
    "all_reduce/host/own": {
        "tree": {"64": 1e-6, "1024": 1e-6},
        "ring": {"64": 3e-6, "1024": 5e-5},
        "direct": {"64": 2e-6},
    },
    "broadcast/host/carried": {"mpi": {"64": 1e-6}},
}


def test_lines_show_crossovers_and_gains() -> None:
    assert lines(REPORTED, TIMES) == [
        "operation   tensor  dtypes     fastest",
        "all_reduce  window  MPI's own  mpi up to 128 B, window above",
        "all_reduce  host    others     tree",
        "broadcast   host    all        mpi",
        "",
        "speedup over the algorithm in the fourth column, by bytes of the whole tensor",
        "operation   tensor  dtypes     against     64B  1KiB",
        "all_reduce  window  MPI's own  mpi        1.00  4.50",
        "all_reduce  host    others     next best  2.00    50",
        "broadcast   host    all        mpi        1.00",
    ]


def test_without_times_no_comparison_is_printed() -> None:
    assert ratios(REPORTED, {})[2:] == [
        "all_reduce  window  MPI's own  next best",
        "all_reduce  host    others     next best",
        "broadcast   host    all        next best",
    ]
