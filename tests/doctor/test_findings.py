"""Findings: their table, their counts, and the exit code that follows from them."""

from __future__ import annotations

import pytest

from hpctrain.doctor.findings import Finding, counts, error, exit_code, note, ok, summary, table, warning

FINDINGS = [ok("torch", "2.13"), warning("folder", "word " * 40, "reason " * 30, "advice"), error("x", "y", "", "")]


def test_a_finding_is_one_line_followed_by_reason_and_advice() -> None:
    assert table([warning("MPI", "two of them", "they fight", "remove one")]) == [
        "warning MPI  two of them",
        "             why: they fight",
        "             do:  remove one",
    ]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_lines_are_wrapped_at_the_width(width: int) -> None:
    lines = table(FINDINGS, width)
    assert max(map(len, lines)) <= width
    assert sum(line.count("word") for line in lines) == 40 and sum(line.count("reason") for line in lines) == 30
    assert {line[:8].strip() for line in lines} == {"ok", "warning", "error", ""}


def test_a_path_is_not_wrapped() -> None:
    path = "/very/long-path/" * 12
    assert any(path in line for line in table([ok("x", f"it is in {path}")], 80))


def test_findings_are_counted_by_level() -> None:
    assert table([]) == [] and summary([]) == "0 ok, 0 notes, 0 warnings, 0 errors"
    assert summary(FINDINGS) == "1 ok, 0 notes, 1 warning, 1 error"


FINE = [ok("a", "x"), note("b", "y", "why")]
BAD = warning("c", "z", "why", "do")
WORST = error("d", "z", "why", "do")


@pytest.mark.parametrize(
    "findings, code, strict_code", [(FINE, 0, 0), ([*FINE, BAD], 0, 1), ([*FINE, BAD, WORST], 1, 1)]
)
def test_errors_fail_and_strict_makes_warnings_fail(findings: list[Finding], code: int, strict_code: int) -> None:
    assert (exit_code(findings), exit_code(findings, strict=True)) == (code, strict_code)


def test_counts_have_every_level() -> None:
    assert counts([*FINE, BAD]) == {"ok": 1, "note": 1, "warning": 1, "error": 0}
    assert WORST.to_json() == {"level": "error", "topic": "d", "found": "z", "why": "why", "advice": "do"}
