"""Figures of the communication benchmarks: bandwidths, ratios, targets and pictures."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from communication_figures import FACTORS, Figures, Row, by_size_and_name, names_of, row_of, sizes_of, speedup, targets
from harness.report import Target

RANKS = (2, 3, 4, 8, 9)


def busiest_link(operation: str, ranks: int) -> Fraction:
    """Return the share of the whole tensor that the busiest rank of a ring sends, counted step by step."""
    share = Fraction(1, ranks)
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if operation in rounds:  # in each round every rank sends one share to its neighbour, ranks - 1 times
        return sum((share for _ in range(rounds[operation] * (ranks - 1))), Fraction(0))
    return Fraction(1)  # the root, or the sender, sends the whole tensor once


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("operation", FACTORS)
def test_bus_bandwidth_counts_the_bytes_of_the_busiest_rank(operation: str, ranks: int) -> None:
    assert FACTORS[operation](ranks) == pytest.approx(float(busiest_link(operation, ranks)))


@pytest.mark.parametrize(
    "operation, ranks, busbw",
    [
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("all_reduce", 2, 1.0),
        ("pingpong", 2, 1.0),
    ],
)
def test_a_gigabyte_in_a_second_is_1_gb_per_s(operation: str, ranks: int, busbw: float) -> None:
    for seconds in (1.0, 0.5):
        trip = 2 * seconds if operation == "pingpong" else seconds
        made = row_of(operation, "mpi", 10**9, [trip], ranks=ranks, size=10**9, calls=1)
        assert made["algbw"] == 1 / seconds  # of 10^9 bytes, not 2^30
        assert made["busbw"] == pytest.approx(busbw / seconds)


def row(name: str, size: int, median: float, nbytes: int | None = None) -> Row:
    return row_of("all_reduce", name, nbytes or size, [median], ranks=2, size=size, calls=1)


def test_a_row_holds_the_statistics_of_numpy() -> None:
    seconds = [0.003, 0.001, 0.010, 0.002, 0.004]
    made = row_of("all_reduce", "hpctrain", 4000, seconds, ranks=4, size=4000, calls=7)
    assert (made["min"], made["median"]) == (0.001, 0.003)
    assert made["p95"] == pytest.approx(np.percentile(seconds, 95))
    assert made["algbw"] == pytest.approx(4000 / 0.003 / 1e9)
    assert made["busbw"] == pytest.approx(1.5 * made["algbw"])
    assert (made["repeats"], made["calls"]) == (5, 7)


def test_a_pingpong_takes_half_of_its_round_trip() -> None:
    made = row_of("pingpong", "mpi", 8, [2e-6, 4e-6, 6e-6], ranks=2, size=8, calls=1)
    assert (made["min"], made["median"]) == (1e-6, 2e-6)
    assert made["algbw"] == pytest.approx(8 / 2e-6 / 1e9)


def test_a_speedup_is_a_ratio_of_medians() -> None:
    made = by_size_and_name([row("hpctrain", 8, 0.5), row("mpi", 8, 2.0), row("mpi", 4, 1.0)])
    assert speedup(made, 8, "hpctrain", "mpi") == 4.0
    assert speedup(made, 4, "hpctrain", "mpi") is None
    assert speedup(made, 8, "hpctrain", "gloo") is None


def test_other_libraries_follow_ours_in_a_fixed_order() -> None:
    rows = [row(name, 8, 1.0) for name in ("gloo", "hpctrain", "mpi", "hpctrain ring", "mpi 16 MiB")]
    made = by_size_and_name([*rows, row("mpi", 4, 1.0)])
    assert names_of(made) == ["hpctrain", "hpctrain ring", "mpi", "mpi 16 MiB", "gloo"]
    assert sizes_of(made) == [4, 8]


def test_bandwidths_count_the_bytes_of_the_rows_dtype() -> None:
    made = row("hpctrain bfloat16", 8000, 1e-6, nbytes=4000)
    assert made["size"] == 8000 and made["algbw"] == pytest.approx(4.0)


# Targets -------------------------------------------------------------------------------------------------------------


TWIN = "hpctrain bfloat16"
K, M = 2**10, 2**20


def figures(**medians: dict[int, float]) -> Figures:
    """Return figures by name ("mpi_16_MiB" for "mpi 16 MiB") of medians by size."""
    rows = [
        row_of("all_reduce", name.replace("_", " "), size, [median], ranks=2, size=size, calls=1)
        for name, by_size in medians.items()
        for size, median in by_size.items()
    ]
    return by_size_and_name(rows)


def found(operation: str, ranks: int, made: Figures, twin: str = TWIN) -> dict[str, Target]:
    return {one.what: one for one in targets(operation, ranks, made, twin)}


def only(start: str, all_of_them: dict[str, Target]) -> Target:
    (one,) = [target for what, target in all_of_them.items() if what.startswith(start)]
    return one


def test_the_mean_is_geometric_and_requires_every_size() -> None:
    sizes = (64 * K, M, 4 * M, 25 * M, 64 * M)
    library = dict(zip(sizes, (1.0, 2.0, 4.0, 8.0, 16.0)))
    made = figures(hpctrain=dict.fromkeys(sizes, 1.0), mpi=library, mpi_16_MiB={64 * M: 8.0})
    one_call = only("times the library (one call)", found("all_reduce", 2, made))
    assert one_call.value == pytest.approx(4.0) and one_call.target == 4.0
    better = only("times the library (the better", found("all_reduce", 2, made))
    assert better.value == pytest.approx((1 * 2 * 4 * 8 * 8) ** 0.2)
    del made[M, "hpctrain"]
    assert not [what for what in found("all_reduce", 2, made) if "mean" in what]


def test_gloo_is_compared_at_25_mib() -> None:
    made = figures(hpctrain={25 * M: 1.0, M: 1.0}, gloo={25 * M: 14.0, M: 100.0})
    one = only("times gloo", found("all_reduce", 2, made))
    assert one.value == 14.0 and not one.met


@pytest.mark.parametrize("operation, ranks", [("all_reduce", 4), ("broadcast", 2), ("all_gather", 2)])
def test_large_sizes_must_all_be_faster(operation: str, ranks: int) -> None:
    made = figures(hpctrain={64 * K: 1.0, M: 1.0, 4 * M: 1.0}, mpi={64 * K: 1.0, M: 5.0, 4 * M: 2.9})
    one = only("hpctrain: times the library from 1 MiB up", found(operation, ranks, made))
    assert one.value == pytest.approx(2.9) and not one.met and "4 MiB" in one.what


def test_the_slack_is_five_percent_and_three_microseconds() -> None:
    made = figures(hpctrain={4: 5.05e-6}, hpctrain_outside={4: 5.2e-6}, mpi={4: 2e-6})
    every = found("all_reduce", 2, made)
    ours = only("(library + 5 % + 3 us) / hpctrain,", every)
    outside = only("(library + 5 % + 3 us) / hpctrain outside,", every)
    assert ours.value == pytest.approx(5.1 / 5.05) and ours.met
    assert outside.value == pytest.approx(5.1 / 5.2) and not outside.met


def test_stream_bandwidth_counts_bytes_read_and_written() -> None:
    rate = 2 * 64 * M / 0.009  # a copy reads and writes
    with_copy = found("all_reduce", 2, figures(hpctrain={64 * M: 0.01}, copy={64 * M: 0.009}))
    one = only("2 S / (time x streaming rate)", with_copy)
    assert one.value == pytest.approx(2 * 64 * M / (0.01 * rate))
    without = found("all_reduce", 2, figures(hpctrain={64 * M: 0.01}))
    assert not [what for what in without if "streaming" in what]


@pytest.mark.parametrize("twin, value", [("hpctrain bfloat16", 2.0), ("hpctrain float32", 0.5)])
def test_bfloat16_has_a_target_whichever_dtype_was_requested(twin: str, value: float) -> None:
    made = figures(**{"hpctrain": {8: 2.0}, twin: {8: 1.0}})
    assert only("float32 / bfloat16", found("all_reduce", 2, made, twin=twin)).value == value


def test_a_pingpong_has_no_target() -> None:
    assert not found("pingpong", 2, figures(hpctrain={8: 2.0}, mpi={8: 1.0}))
