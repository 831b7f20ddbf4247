"""Table of findings: level, topic and observation in one line; reason and advice below it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from hpctrain.doctor.finding import Finding, counts

_LEAST = 40  # minimum columns of a text, however narrow the terminal is


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """Return the lines of the table, at most ``width`` columns wide if the words permit."""
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
    """Return the counts as text: ``11 ok, 1 note, 2 warnings, 0 errors``."""
    found = counts(findings)
    words = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in found.items() if level != "ok"]
    return ", ".join([f"{found['ok']} ok", *words])


def grid(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Return rows of cells as aligned lines: columns in ``left`` are left-aligned, the others right-aligned."""
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
