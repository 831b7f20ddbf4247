"""Clock offsets between nodes, so that the records of their ranks share one time axis.

The ranks of a node share a clock. The first rank of each node sends its clock to rank 0 several
times. The fastest round trip is the most accurate (Cristian, 1989): the clock was read at its
midpoint, with an error of at most half of the round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hpctrain.collectives.communicator import Communicator

Clock = Callable[[], float]
ROUNDS = 24


def offsets(comm: Communicator, *, clock: Clock = time.monotonic, nodes: Sequence[int] | None = None) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of rank 0's. Collective.

    ``nodes`` are the nodes of the ranks, if they differ from those of the communicator.
    """
    places = list(nodes) if nodes is not None else comm.all_gather_object(comm.node)
    found = {places[0]: 0.0}
    for rank, node in enumerate(places):
        if node not in found:
            found[node] = _ahead(comm, rank, clock)
    everyone = comm.broadcast_object(found)  # only rank 0 has measured
    return [everyone[node] for node in places]


def _ahead(comm: Communicator, peer: int, clock: Clock) -> float:
    """Return on rank 0 the seconds by which the peer's clock is ahead."""
    told = torch.zeros(1, dtype=torch.float64)
    if comm.rank == 0:
        return ahead([_ask(comm, peer, clock, told) for _ in range(ROUNDS)])
    if comm.rank == peer:
        for _ in range(ROUNDS):
            comm.recv(told, 0)
            told.fill_(clock())
            comm.send(told, 0)
    return 0.0


def _ask(comm: Communicator, peer: int, clock: Clock, told: torch.Tensor) -> tuple[float, float, float]:
    asked = clock()
    comm.send(told, peer)
    comm.recv(told, peer)
    return asked, told.item(), clock()


def ahead(answers: Sequence[tuple[float, float, float]]) -> float:
    """Return how far a clock is ahead, from triples: time of request, peer's clock, time of answer."""
    asked, said, answered = min(answers, key=lambda each: each[2] - each[0])
    return said - (asked + answered) / 2
