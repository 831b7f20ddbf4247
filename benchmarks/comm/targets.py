"""Performance targets of the communication layer, and their comparison with the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from comm.figures import Figures, ratio, sizes_of
from comm.names import COMMON, COPY, GLOO, LIBRARY, OURS, OUTSIDE, PIECES
from comm.sizes import STREAM_SIZE, size_text

MEAN_SIZES = tuple(size * 2**10 for size in (64, 1024, 4096, 25600, 65536))
MEAN_TARGET = 4.0  # times faster than the library, two ranks
GLOO_SIZE, GLOO_TARGET = 25 * 2**20, 15.0
LARGE, LARGE_TARGET = 2**20, 3.0  # from this number of bytes up, times faster than the library
SLACK, PYTHON = 0.05, 3e-6  # allowed excess of auto over the library, relative and in seconds
STREAM_TARGET = 0.9  # at STREAM_SIZE


@dataclass(frozen=True)
class Target:
    """Figure with its target, which is a minimum."""

    what: str
    value: float
    target: float

    @property
    def met(self) -> bool:
        """Return whether the figure reaches its target."""
        return self.value >= self.target


def targets(
    operation: str, ranks: int, figures: Figures, twin: str
) -> Iterator[Target]:
    """Yield the targets for which the run has figures; ``twin`` is hpctrain with the other of two dtypes."""
    if operation == "all_reduce" and ranks == 2:
        yield from _mean(figures)
        yield from _gloo(figures)
    if operation == "all_reduce" and ranks > 2 or operation in ("reduce_scatter", "all_gather", "broadcast"):
        yield from _large(figures, OURS)
    if operation == "all_gather":
        yield from _large(figures, COMMON)
    if operation != "pingpong":
        yield from _never_slower(figures, OURS, PYTHON)
        yield from _never_slower(figures, OUTSIDE, PYTHON)
    if operation == "all_reduce":
        yield from _stream(figures)
        yield from _twin(figures, twin)


def _mean(figures: Figures) -> Iterator[Target]:
    """Compare with the library's one call, and with the better of that and messages of 16 MiB."""
    for what, others in (("one call", (LIBRARY,)), ("the better of one call and 16 MiB messages", (LIBRARY, PIECES))):
        ratios = []
        for size in MEAN_SIZES:
            found = [value for name in others if (value := ratio(figures, size, OURS, name)) is not None]
            if not found:
                return
            ratios.append(min(found))
        mean = statistics.geometric_mean(ratios)
        yield Target(f"times the library ({what}), mean of 64K,1M,4M,25M,64M", mean, MEAN_TARGET)


def _gloo(figures: Figures) -> Iterator[Target]:
    value = ratio(figures, GLOO_SIZE, OURS, GLOO)
    if value is not None:
        yield Target("times gloo at 25 MiB", value, GLOO_TARGET)


def _large(figures: Figures, name: str) -> Iterator[Target]:
    found = [
        (value, size)
        for size in sizes_of(figures)
        if size >= LARGE and (value := ratio(figures, size, name, LIBRARY)) is not None
    ]
    if found:
        value, size = min(found)
        yield Target(f"{name}: times the library from 1 MiB up, least (at {size_text(size)})", value, LARGE_TARGET)


def _never_slower(figures: Figures, name: str, slack: float) -> Iterator[Target]:
    """Compare with the allowed time: that of the library's own call and the slack."""
    found = []
    for size in sizes_of(figures):
        own, other = figures.get((size, name)), figures.get((size, LIBRARY))
        if own and other:
            found.append(((other.median * (1 + SLACK) + slack) / own.median, size))
    if found:
        value, size = min(found)
        yield Target(f"(library + 5 % + 3 us) / {name}, least (at {size_text(size)})", value, 1.0)


def _stream(figures: Figures) -> Iterator[Target]:
    """Compare with a copy, which has the same memory traffic: 2 S / time over 2 S / time of the copy."""
    value = ratio(figures, STREAM_SIZE, OURS, COPY)
    if value is not None:
        yield Target("2 S / (time x streaming rate) at 64 MiB", value, STREAM_TARGET)


def _twin(figures: Figures, twin: str) -> Iterator[Target]:
    """Compare bfloat16 with float32 of equally many elements, whichever of them the run measured."""
    halves = (OURS, twin) if twin.endswith("bfloat16") else (twin, OURS)
    found = []
    for size in sizes_of(figures):
        value = ratio(figures, size, halves[1], halves[0])
        if value is not None:
            found.append((value, size))
    if found:
        value, size = min(found)
        yield Target(f"float32 / bfloat16 of as many elements, least (at {size_text(size)})", value, 1.0)
