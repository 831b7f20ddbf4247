"""Measurement of the clock offsets between nodes.

A deadline is computed from one node's clock and observed on another's; locks and checkpoints carry
their timestamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.comm.clock_offset import answer_clock, ask_clock, offset
from hpctrain.doctor.findings import Finding, ok, warning
from hpctrain.util.format import format_seconds

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

ROUNDS = 20  # round-trip messages to each node; the fastest counts
MAX_OFFSET = 1.0  # seconds from which on clocks count as too far apart


@dataclass(frozen=True)
class Skew:
    """Seconds by which a node's clock is ahead of the first node's, and the error bound."""

    node: int
    host: str
    seconds: float
    within: float


def measure(
    comm: Communicator, hosts: Sequence[str], seconds: float, clock: Callable[[], float] = time.time
) -> list[Skew]:
    """Return the clock offset of every node except the first, as far as time allows. Collective.

    ``hosts`` are the nodes' names. Rank 0 exchanges messages with the first rank of every other
    node, one after the other.
    """
    import torch

    leaders = _leaders(comm)
    found: list[Skew] = []
    if comm.rank == 0:
        end = time.monotonic() + seconds
        for node, peer in enumerate(leaders[1:], 1):
            rounds = ROUNDS if time.monotonic() < end else 0
            comm.send(torch.tensor([rounds]), peer)
            if samples := ask_clock(comm, peer, rounds, clock):
                found.append(Skew(node, hosts[node], *offset(samples)))
    elif comm.rank in leaders:
        wanted = torch.zeros(1, dtype=torch.int64)
        comm.recv(wanted, 0)
        answer_clock(comm, 0, int(wanted), clock)
    skews: list[Skew] = comm.broadcast_object(found)
    return skews


def check(skews: Sequence[Skew]) -> Iterator[Finding]:
    """Yield the findings on the clocks."""
    off = [skew for skew in skews if abs(skew.seconds) - skew.within > MAX_OFFSET]
    for skew in off:
        yield warning(
            "clocks",
            f"{skew.host} is {describe(skew)} the first node",
            "a run's deadline, the age of its lock and the dates of its checkpoints are off by that",
            "tell the site (NTP or chrony does not run there)",
        )
    if not skews or off:
        return
    most = max(skews, key=lambda skew: abs(skew.seconds))
    seen = abs(most.seconds) > most.within
    yield ok(
        "clocks", f"{most.host} is furthest off, {describe(most)} the first node" if seen else "no difference seen"
    )


def describe(skew: Skew) -> str:
    """Return an offset as text: ``1.2 ms ahead of (within 0.1 ms)``."""
    side = "ahead of" if skew.seconds >= 0 else "behind"
    return f"{format_seconds(abs(skew.seconds))} (within {format_seconds(skew.within)}) {side}"


def _leaders(comm: Communicator) -> list[int]:
    """Return the first rank of every node."""
    first: dict[int, int] = {}
    for rank, node in enumerate(comm.all_gather_object(comm.node)):
        first.setdefault(node, rank)
    return [first[node] for node in sorted(first)]
