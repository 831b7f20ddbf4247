"""Findings and numbers are aligned, and no line is wider than asked for."""

from __future__ import annotations

import pytest

from hpctrain.doctor.finding import error, ok, warning
from hpctrain.doctor.text import grid, summary, table

FINDINGS = [ok("torch", "2.13"), warning("folder", "word " * 40, "reason " * 30, "advice"), error("x", "y", "", "")]


def test_a_finding_stands_in_one_line_with_its_reason_and_advice_below() -> None:
    assert table([warning("MPI", "two of them", "they fight", "remove one")]) == [
        "warning MPI  two of them",
        "             why: they fight",
        "             do:  remove one",
    ]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_lines_keep_to_the_width_and_lose_no_word(width: int) -> None:
    lines = table(FINDINGS, width)
    assert max(map(len, lines)) <= width
    assert sum(line.count("word") for line in lines) == 40 and sum(line.count("reason") for line in lines) == 30
    assert {line[:8].strip() for line in lines} == {"ok", "warning", "error", ""}


def test_a_path_is_not_torn() -> None:
    path = "/very/long-path/" * 12
    assert any(path in line for line in table([ok("x", f"it is in {path}")], 80))


def test_no_finding_is_no_line() -> None:
    assert table([]) == [] and summary([]) == "0 ok, 0 notes, 0 warnings, 0 errors"


def test_summary_counts() -> None:
    assert summary(FINDINGS) == "1 ok, 0 notes, 1 warning, 1 error"


def test_grid_aligns_columns() -> None:
    assert grid([("host", "rank"), ("n1", "10")]) == ["host  rank", "n1      10"]
