"""Speed of a machine: the rates by which a forecast divides its work, and their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.cluster.binding import threads_for
from hpctrain.errors import UsageError

Curve = Mapping[int, float]  # rate of all threads together, by number of threads


@dataclass(frozen=True)
class Link:
    """Cost model of a message: ``latency + bytes / bandwidth`` seconds."""

    latency: float
    bandwidth: float  # bytes per second, of one rank that uses the link alone

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Seat:
    """Per-rank share of a node's resources, in operations, bytes and seconds."""

    threads: int
    flops: float
    bandwidth: float
    call: float  # overhead of an operator, in seconds
    crowd: float  # ranks that share one core in turn; 1 where each rank has its own cores
    meeting: float


@dataclass(frozen=True)
class Machine:
    """Rates of a node and of its network; ``flops`` is for one dtype.

    For a ``cpu``, rates are by the number of busy cores. For ``cuda``, they are those of one GPU,
    with one rank per GPU.
    """

    name: str
    source: str  # human-readable
    kind: str  # cpu or cuda
    cores: int
    flops: Curve
    bandwidth: Curve
    call: float
    meeting: float  # seconds of one synchronization between the ranks of a node
    turn: float  # the same on oversubscribed cores
    inside: Link  # between ranks of a node that do not share memory
    between: Link  # between nodes, for a whole node
    disk: float  # bytes per second
    host_link: float = 25e9  # bytes per second between a GPU and its host, in either direction
    host_bandwidth: float = 100e9  # of host memory, for optimizer steps on the host
    peak: float = 0.0  # operations per second of the rank's whole device, by its data sheet; 0 if unknown
    assumed: tuple[str, ...] = ()  # human-readable assumptions, for rates that were not measured
    busy: bool = False  # other processes were using the machine when it was measured
    at_work: float | None = None  # share of the cores that other processes used then; None if not measured
    slowest: float = 1.0  # time of the slowest tenth of repeats, as a multiple of the time at the stated rates

    def seat(self, ranks: int) -> Seat:
        """Return the share of one rank if ``ranks`` ranks share a node."""
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
        """Return whether the ranks of a node can reduce in place in shared memory."""
        return self.kind == "cpu"


def threads_of(cores: int, ranks: int) -> int:
    """Return the threads per rank if ``ranks`` ranks share ``cores`` cores, as a run sets them."""
    if cores < 1 or ranks < 1:
        raise UsageError(f"{ranks} ranks on {cores} cores: there must be at least 1 of each")
    everyone = range(cores)
    return threads_for(everyone, [everyone] * ranks)


def rate(curve: Curve, threads: int) -> float:
    """Return the rate of ``threads`` threads: measured, interpolated linearly, and constant beyond the last point."""
    known = sorted(curve)
    if threads <= known[0]:
        return curve[known[0]] * threads / known[0]
    for low, high in pairwise(known):
        if threads <= high:
            return curve[low] + (curve[high] - curve[low]) * (threads - low) / (high - low)
    return curve[known[-1]]
