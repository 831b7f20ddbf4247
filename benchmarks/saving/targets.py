"""Performance targets of checkpoints, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from saving.background import BackgroundRow
from saving.figures import Figures, ratio
from saving.names import BACKGROUND, DCP, LOAD, OURS, RAW, RAW_READ, TORCH, VERIFY

RAW_TARGET, TORCH_TARGET, DCP_TARGET = 0.95, 3.0, 1.0  # times as fast
CORE = 2.0  # 10^9 bytes per second that a core can verify; the limit if the file is read faster
READ_TARGET = 0.9
RANKS_TARGET = 1.2  # times as long, with files that other numbers of ranks wrote
STALL_TARGET = 1.2  # times as long as copying the bytes
SLOWER_TARGET = 1.05  # times as long as a step without a write


@dataclass(frozen=True)
class Target:
    """Figure with its target, which is a minimum or a maximum."""

    what: str
    value: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Return whether the figure reaches its target."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        """Return the target as text."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


def targets(figures: Figures) -> Iterator[Target]:
    """Yield the targets of saving and loading for which the run has figures."""
    for name, times in ((RAW, RAW_TARGET), (TORCH, TORCH_TARGET), (DCP, DCP_TARGET)):
        value = ratio(figures, OURS, name)
        if value is not None:
            yield Target(f"write: speed / {name}", value, times)
    yield from _reading(figures)
    yield from _other_ranks(figures)


def _reading(figures: Figures) -> Iterator[Target]:
    """Compare with the read bandwidth or the rate of verification on a core, whichever is less."""
    raw = figures.get(RAW_READ)
    for what, name in (("load", LOAD), ("verify", VERIFY)):
        row = figures.get(name)
        if row and raw:
            limit = min(raw.rate, CORE)
            yield Target(f"{what}: speed / min({RAW_READ}, {CORE:g} GB/s per core)", row.rate / limit, READ_TARGET)


def _other_ranks(figures: Figures) -> Iterator[Target]:
    """Compare loading of files from other numbers of ranks with that of a file from the same number."""
    found = [
        (row.median / figures[LOAD].median, name)
        for name, row in figures.items()
        if name.startswith(f"{LOAD},") and LOAD in figures
    ]
    if found:
        value, name = max(found)
        who = name.removeprefix(f"{LOAD}, ")
        yield Target(f"load: time / same rank count, most ({who})", value, RANKS_TARGET, at_least=False)


def background_targets(rows: Iterable[BackgroundRow]) -> Iterator[Target]:
    """Yield the targets of background saving: stall of the loop, and slowdown of a step during the write."""
    for row in rows:
        if row.candidate != BACKGROUND:
            continue
        yield Target("background: stall / (bytes of a rank / memcpy rate)", row.stall / row.floor, STALL_TARGET, False)
        if row.busy is not None:
            yield Target("background: step during a write / without", row.busy / row.free, SLOWER_TARGET, False)
