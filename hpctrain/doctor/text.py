"""Write findings as a table: level, topic and what was found in a line, why it matters and what to do below it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from hpctrain.doctor.finding import Finding, counts

_LEAST = 40  # columns that a text gets, however narrow the terminal is


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """Return the lines of the table, none wider than ``width`` where its words allow that."""
    topics = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        head = f"{finding.level:8}{finding.topic:{topics}}  "
        lines += _wrapped(head, finding.found, len(head), width)
        for label, text in (("why", finding.why), ("do", finding.advice)):
            if text:
                lines += _wrapped(f"{'':{len(head)}}{label + ':':5}", text, len(head) + 5, width)
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """Return the counts in words: ``11 ok, 1 note, 2 warnings, 0 errors``."""
    found = counts(findings)
    words = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in found.items() if level != "ok"]
    return ", ".join([f"{found['ok']} ok", *words])


def grid(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Return rows of cells as aligned lines: the columns in ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = set(left)
    return [
        "  ".join(
            cell.ljust(width) if column in aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _wrapped(head: str, text: str, indent: int, width: int) -> list[str]:
    room = max(width, indent + _LEAST)
    return textwrap.wrap(
        head + text,
        room,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
