"""Findings of a diagnosis: severity, observation, reason and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpctrain.errors import EXIT_FAILURE

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One finding; an ``ok`` finding needs neither a reason nor advice."""

    level: Level
    topic: str
    found: str
    why: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return asdict(self)


def ok(topic: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", topic, found)


def note(topic: str, found: str, why: str, advice: str = "") -> Finding:
    """Return a finding for information."""
    return Finding("note", topic, found, why, advice)


def warning(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding of a problem that costs time, or may make a job fail."""
    return Finding("warning", topic, found, why, advice)


def error(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding of a problem that prevents a job from working."""
    return Finding("error", topic, found, why, advice)


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings per level."""
    found = Counter(finding.level for finding in findings)
    return {level: found[level] for level in LEVELS}


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return the exit code of a diagnosis: 1 if there is an error (with ``strict`` also for a warning)."""
    bad = {"error", "warning"} if strict else {"error"}
    return EXIT_FAILURE if any(finding.level in bad for finding in findings) else 0
