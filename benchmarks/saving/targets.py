"""Hold what checkpoints promise against what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from saving.background import BackgroundRow
from saving.figures import Figures, ratio
from saving.names import BACKGROUND, DCP, LOAD, OURS, RAW, RAW_READ, TORCH, VERIFY

RAW_TARGET, TORCH_TARGET, DCP_TARGET = 0.95, 3.0, 1.0  # times as fast
CORE = 2.0  # 10^9 bytes a second: what a core can check, where the file comes faster
READ_TARGET = 0.9
RANKS_TARGET = 1.2  # times as long, with files that other numbers of ranks wrote
STALL_TARGET = 1.2  # times as long as copying the bytes
SLOWER_TARGET = 1.05  # times as long as a step without a write


@dataclass(frozen=True)
class Target:
    """Hold a figure, what it should be at least or at most, and what it is of."""

    what: str
    value: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Tell whether the figure is as it should be."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        """Return the target as text."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


def targets(figures: Figures) -> Iterator[Target]:
    """Yield those targets of saving and loading for which the run has figures."""
    for name, times in ((RAW, RAW_TARGET), (TORCH, TORCH_TARGET), (DCP, DCP_TARGET)):
        value = ratio(figures, OURS, name)
        if value is not None:
            yield Target(f"write: speed / {name}", value, times)
    yield from _reading(figures)
    yield from _other_ranks(figures)


def _reading(figures: Figures) -> Iterator[Target]:
    """Compare with the read bandwidth or what a core can check, whichever is less."""
    raw = figures.get(RAW_READ)
    for what, name in (("load", LOAD), ("verify", VERIFY)):
        row = figures.get(name)
        if row and raw:
            limit = min(raw.rate, CORE)
            yield Target(f"{what}: speed / min({RAW_READ}, {CORE:g} GB/s a core)", row.rate / limit, READ_TARGET)


def _other_ranks(figures: Figures) -> Iterator[Target]:
    """Compare files of other numbers of ranks with the file of as many ranks as load it."""
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
    """Yield the targets of saving in the background: how long the loop stands still, what the write costs a step."""
    for row in rows:
        if row.candidate != BACKGROUND:
            continue
        yield Target("background: stall / (bytes of a rank / memcpy rate)", row.stall / row.floor, STALL_TARGET, False)
        if row.busy is not None:
            yield Target("background: step during a write / without", row.busy / row.free, SLOWER_TARGET, False)
