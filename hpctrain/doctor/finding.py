"""Hold what an examination found: how bad it is, why it matters, and what to do."""

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
    """Hold one finding; what is ``ok`` needs neither a reason nor advice."""

    level: Level
    topic: str
    found: str
    why: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def ok(topic: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("ok", topic, found)


def note(topic: str, found: str, why: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding("note", topic, found, why, advice)


def warning(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding that will cost time, or a job on a bad day."""
    return Finding("warning", topic, found, why, advice)


def error(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding with which a job cannot do its work."""
    return Finding("error", topic, found, why, advice)


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Return how many findings there are of each level."""
    found = Counter(finding.level for finding in findings)
    return {level: found[level] for level in LEVELS}


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return the exit code of an examination: 1 where there is an error, with ``strict`` a warning, too."""
    bad = {"error", "warning"} if strict else {"error"}
    return EXIT_FAILURE if any(finding.level in bad for finding in findings) else 0
