"""Say how fast a machine is: the rates that a forecast divides work by, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.cluster.binding import threads_for
from hpctrain.errors import UsageError

Curve = Mapping[int, float]  # what all threads do together, by how many there are


@dataclass(frozen=True)
class Link:
    """Hold what a message costs: ``latency + bytes / bandwidth`` seconds."""

    latency: float
    bandwidth: float  # bytes a second, of one rank that has it to itself

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Seat:
    """Hold what one rank gets of a node that it shares with others, in operations, bytes and seconds."""

    threads: int
    flops: float
    bandwidth: float
    call: float  # seconds that an operator takes besides
    crowd: float  # ranks that take turns on what one of them would have; 1 where each has its own
    meeting: float


@dataclass(frozen=True)
class Machine:
    """Hold the rates of a node and of its network; those of products are for one dtype.

    A ``cpu`` has its rates by the number of busy cores; of a ``cuda`` machine they are those of one GPU, a rank each.
    """

    name: str
    source: str  # in words
    kind: str  # cpu or cuda
    cores: int
    flops: Curve
    bandwidth: Curve
    call: float
    meeting: float  # seconds in which the ranks of a node wait for each other once
    turn: float  # the same where they take turns on a core
    inside: Link  # from rank to rank in a node, where they share no memory
    between: Link  # from node to node: all that a node has
    disk: float  # bytes a second
    host_link: float = 25e9  # bytes a second from a GPU to its host and back
    host_bandwidth: float = 100e9  # of the host's memory, for updates that are made there
    peak: float = 0.0  # operations a second of the whole rank's device, as its maker says; 0: not known
    assumed: tuple[str, ...] = ()  # what was not measured, in words
    busy: bool = False  # others were at work on it when it was measured
    at_work: float | None = None  # share of the cores that others kept busy then; None where nothing was measured
    slowest: float = 1.0  # the time of the slowest tenth of repeats, as a multiple of the rates' own

    def seat(self, ranks: int) -> Seat:
        """Return what a rank gets where ``ranks`` share a node."""
        if self.kind != "cpu":
            return Seat(1, self.flops[1], self.bandwidth[1], self.call, 1.0, self.meeting)
        threads = threads_of(self.cores, ranks)
        wanted = threads * ranks
        busy = min(wanted, self.cores)
        crowd = max(1.0, wanted / self.cores)
        share = threads / busy / crowd
        return Seat(
            threads=threads,
            flops=rate(self.flops, busy) * share,
            bandwidth=rate(self.bandwidth, busy) * share,
            call=self.call * crowd,
            crowd=crowd,
            meeting=self.turn if crowd > 1 else self.meeting,
        )

    @property
    def shares_memory(self) -> bool:
        """Tell whether the ranks of a node reduce where their tensors lie."""
        return self.kind == "cpu"


def threads_of(cores: int, ranks: int) -> int:
    """Return the threads of a rank where so many share the cores of a node, as a run sets them."""
    if cores < 1 or ranks < 1:
        raise UsageError(f"{ranks} ranks on {cores} cores: there must be at least 1 of each")
    everyone = range(cores)
    return threads_for(everyone, [everyone] * ranks)


def rate(curve: Curve, threads: int) -> float:
    """Return what so many threads do together: as measured, on a straight line between, and no more beyond."""
    known = sorted(curve)
    if threads <= known[0]:
        return curve[known[0]] * threads / known[0]
    for low, high in pairwise(known):
        if threads <= high:
            return curve[low] + (curve[high] - curve[low]) * (threads - low) / (high - low)
    return curve[known[-1]]
