"""Measurement of each algorithm's time per operation, memory location of the tensor, and size.

Note: method. The time is that of one call in a row of consecutive calls, as in the OSU
micro-benchmarks, with a barrier before the row. The result is the median over many rows of the
slowest rank. First, every algorithm gets short rows at every size. An algorithm that takes several
times as long as the best is not tried again. Then repeated sweeps measure one row of each undecided
case until the time is up. A temporary disturbance of the machine thus affects a few rows of every
case, and no algorithm more than another. The root rotates, because a row of broadcasts from one
root would measure how fast that root can send, and not when the data arrive. The first results are
checked against the expected numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hpctrain.collectives.choice.table import Key, Layout, Steps, Table, fastest
from hpctrain.collectives.choice.timing import DTYPES, Part, Space

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

SIZES = tuple(4**power for power in range(1, 14))  # 4 bytes to 64 MiB
MOST_SWEEPS = 51
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MOVES = ("all_gather", "broadcast")  # the same for every dtype


@dataclass
class Measured:
    """Seconds that each algorithm took, by bytes of the whole tensor."""

    layout: Layout
    times: dict[Key, dict[str, dict[int, float]]] = field(default_factory=dict)
    left_out: dict[tuple[Key, str], str] = field(default_factory=dict)  # why an algorithm was not measured
    wrong: set[tuple[Key, str]] = field(default_factory=set)  # produced wrong numbers at some size: never chosen
    complete: bool = True  # False: the time was up before the largest size

    def table(self) -> Table:
        """Return the table of the fastest algorithms; an incomplete table ends at the largest size measured."""
        trusted = {
            key: {name: by_size for name, by_size in times.items() if (key, name) not in self.wrong}
            for key, times in self.times.items()
        }
        return Table(self.layout, {key: self._steps(times) for key, times in trusted.items() if times})

    def _steps(self, times: dict[str, dict[int, float]]) -> Steps:
        *early, (end, name) = fastest(times)
        return (*early, (end if self.complete else max(map(max, times.values())), name))


def layout_of(comm: Communicator) -> Layout:
    """Return the layout of a communicator, the same on all ranks. Collective."""
    layout: Layout = comm.broadcast_object(Layout(comm.size, comm.nodes, comm.local_size))
    return layout


def keys_of(comm: Communicator, device: torch.device) -> list[Key]:
    """Return the keys to measure: operations at each memory location that this job's tensors can have."""
    places = [*(["window"] if comm.shares_memory else []), "host", *(["cuda"] if device.type == "cuda" else [])]
    moved: list[Key] = [(operation, place, "carried") for operation in MOVES for place in places]
    return [(operation, place, kind) for operation in REDUCTIONS for place in places for kind in DTYPES] + moved


def measure(
    comm: Communicator,
    sizes: Sequence[int] = SIZES,
    seconds: float = 60.0,
    device: torch.device = torch.device("cpu"),
    progress: Callable[[float, str], None] = lambda seconds, what: None,
) -> Measured:
    """Measure all algorithms at all sizes in about ``seconds``; return the same result on all ranks. Collective.

    ``sizes`` are bytes. A size that the ranks cannot share equally is replaced by the next larger
    one that they can. ``progress`` is called with the elapsed seconds and the next case. If the
    time is insufficient, the largest sizes are not measured.
    """
    found = Measured(layout_of(comm))
    keys = keys_of(comm, device) if comm.size > 1 else []
    spaces = {place: Space(comm, place, max(sizes), device) for place in dict.fromkeys(key[1] for key in keys)}
    parts = [Part(comm, key, size, spaces[key[1]]) for size in sorted(set(sizes)) for key in keys]
    clock = _Clock(comm, seconds)
    begun = []
    for part in parts:
        if clock.is_up():
            found.complete = False
            break
        progress(clock.elapsed(), part.name)
        part.begin()
        begun.append(part)
    _sweep([part for part in begun if part.undecided], clock, progress)
    for part, times in zip(begun, _of_slowest(comm, [part.times for part in begun])):
        _collect(found, part, times)
    return found


def _sweep(parts: Sequence[Part], clock: _Clock, progress: Callable[[float, str], None]) -> None:
    for _ in range(MOST_SWEEPS):
        for part in parts:
            if clock.is_up():
                return
            progress(clock.elapsed(), part.name)
            part.sweep()


def _collect(found: Measured, part: Part, slowest: Mapping[str, Sequence[float]]) -> None:
    """Add the results of one case to ``found``, given the rows of the slowest rank."""
    found.left_out |= {(part.key, name): reason for name, reason in part.left_out.items()}
    found.wrong |= {(part.key, name) for name in part.wrong}
    for name, first in part.first.items():
        seconds = statistics.median(slowest[name]) if slowest.get(name) else first
        found.times.setdefault(part.key, {}).setdefault(name, {})[part.size] = seconds


def _of_slowest(comm: Communicator, own: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
    """Return, for each case and row, the time of the slowest rank."""
    return [
        {name: [max(row) for row in zip(*(times[name] for times in of_ranks))] for name in of_ranks[0]}
        for of_ranks in zip(*comm.all_gather_object(own))
    ]


class _Clock:
    """Clock with a time limit; rank 0 decides for all ranks."""

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._comm = comm
        self._start = time.monotonic()
        self._seconds = seconds

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def is_up(self) -> bool:
        """Return whether the time is up. Collective."""
        return bool(self._comm.broadcast_object(self.elapsed() >= self._seconds))
