"""Printed table of a calibration: crossovers and the gain of each selected algorithm, in aligned columns."""

from __future__ import annotations

from math import inf

from hpctrain.comm.tuning import table
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout

TABLE = AlgorithmTable(
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
    assert table.lines(TABLE, TIMES) == [
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
    assert table.ratios(TABLE, {})[2:] == [
        "all_reduce  window  MPI's own  next best",
        "all_reduce  host    others     next best",
        "broadcast   host    all        next best",
    ]
