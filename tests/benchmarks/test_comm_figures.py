from __future__ import annotations

import numpy as np
import pytest
from comm.figures import Row, by_size_and_name, names_of, percentile, ratio, row_of, sizes_of, to_json


def row(name: str, size: int, median: float, nbytes: int | None = None) -> Row:
    return row_of("all_reduce", name, nbytes or size, [median], ranks=2, size=size, calls=1)


def test_a_row_holds_the_statistics_of_numpy() -> None:
    seconds = [0.003, 0.001, 0.010, 0.002, 0.004]
    made = row_of("all_reduce", "hpctrain", 4000, seconds, ranks=4, size=4000, calls=7)
    assert (made.min, made.median) == (0.001, 0.003)
    assert made.p95 == pytest.approx(np.percentile(seconds, 95))
    assert made.algbw == pytest.approx(4000 / 0.003 / 1e9)
    assert made.busbw == pytest.approx(1.5 * made.algbw)
    assert (made.repeats, made.calls) == (5, 7)


def test_a_pingpong_takes_half_of_its_round_trip() -> None:
    made = row_of("pingpong", "mpi", 8, [2e-6, 4e-6, 6e-6], ranks=2, size=8, calls=1)
    assert (made.min, made.median) == (1e-6, 2e-6)
    assert made.algbw == pytest.approx(8 / 2e-6 / 1e9)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 41])
@pytest.mark.parametrize("percent", [0, 5, 50, 95, 100])
def test_percentiles_equal_numpys(count: int, percent: float) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_ratio_is_the_speedup() -> None:
    figures = by_size_and_name([row("hpctrain", 8, 0.5), row("mpi", 8, 2.0), row("mpi", 4, 1.0)])
    assert ratio(figures, 8, "hpctrain", "mpi") == 4.0
    assert ratio(figures, 4, "hpctrain", "mpi") is None
    assert ratio(figures, 8, "hpctrain", "gloo") is None


def test_other_libraries_follow_ours_in_a_fixed_order() -> None:
    rows = [row(name, 8, 1.0) for name in ("gloo", "hpctrain", "mpi", "hpctrain ring", "mpi 16 MiB")]
    figures = by_size_and_name([*rows, row("mpi", 4, 1.0)])
    assert names_of(figures) == ["hpctrain", "hpctrain ring", "mpi", "mpi 16 MiB", "gloo"]
    assert sizes_of(figures) == [4, 8]


def test_bandwidths_count_the_bytes_of_the_rows_dtype() -> None:
    made = row("hpctrain bfloat16", 8000, 1e-6, nbytes=4000)
    assert made.size == 8000 and made.algbw == pytest.approx(4.0)


def test_json_holds_every_column() -> None:
    (plain,) = to_json([row("mpi", 8, 1.0)])
    assert Row(**plain) == row("mpi", 8, 1.0)
