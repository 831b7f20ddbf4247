"""Targets of figures, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.report import table

_SMALL = 0.005  # smaller figures would show as zero with two decimals


@dataclass(frozen=True)
class Target:
    """Figure with its target, which is a minimum or a maximum."""

    what: str
    value: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        """Return the target as text."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


def at_least(what: str, value: float | None, target: float) -> Iterator[Target]:
    """Yield a figure with its minimum, if it was measured."""
    if value is not None:
        yield Target(what, value, target)


def at_most(what: str, value: float | None, target: float) -> Iterator[Target]:
    """Yield a figure with its maximum, if it was measured."""
    if value is not None:
        yield Target(what, value, target, at_least=False)


def target_table(found: Iterable[Target]) -> str:
    """Return the figures that have a target, and whether they reach it; empty if there are none."""
    rows = [[one.what, _figure(one.value), one.wanted, "reached" if one.met else "missed"] for one in found]
    return table([["target", "measured", "wanted", ""], *rows]) + "\n" if rows else ""


def targets_json(found: Iterable[Target]) -> list[dict[str, Any]]:
    return [{"what": one.what, "value": one.value, "wanted": one.wanted, "met": one.met} for one in found]


def _figure(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.1e}" if 0 < value < _SMALL else f"{value:.2f}"
