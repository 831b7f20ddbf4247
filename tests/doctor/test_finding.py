"""Findings: their counts, and the exit code that follows from them."""

from __future__ import annotations

from hpctrain.doctor.findings import counts, error, exit_code, note, ok, warning

FINE = [ok("a", "x"), note("b", "y", "why")]
BAD = warning("c", "z", "why", "do")
WORST = error("d", "z", "why", "do")


def test_only_errors_fail() -> None:
    assert exit_code(FINE) == exit_code([*FINE, BAD]) == 0
    assert exit_code([*FINE, BAD, WORST]) == 1


def test_strict_makes_warnings_fail() -> None:
    assert exit_code(FINE, strict=True) == 0
    assert exit_code([*FINE, BAD], strict=True) == 1


def test_counts_have_every_level() -> None:
    assert counts([*FINE, BAD]) == {"ok": 1, "note": 1, "warning": 1, "error": 0}
    assert WORST.to_json() == {"level": "error", "topic": "d", "found": "z", "why": "why", "advice": "do"}
