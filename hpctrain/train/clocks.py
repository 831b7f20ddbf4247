"""Compare the clocks of nodes, so that what their ranks noted can stand in one picture.

The ranks of a node share a clock. The first rank of each node answers rank 0 a few times with what its clock says; the
quickest answer tells most (Cristian, 1989): its clock stood there, plus or minus half the way there and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hpctrain.collectives.communicator import Communicator

Clock = Callable[[], float]
ROUNDS = 24


def offsets(comm: Communicator, *, clock: Clock = time.monotonic, nodes: Sequence[int] | None = None) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's; a call by all ranks.

    ``nodes`` are the nodes of the ranks, where they are not those of the communicator.
    """
    places = list(nodes) if nodes is not None else comm.all_gather_object(comm.node)
    found = {places[0]: 0.0}
    for rank, node in enumerate(places):
        if node not in found:
            found[node] = _ahead(comm, rank, clock)
    everyone = comm.broadcast_object(found)  # only rank 0 has measured
    return [everyone[node] for node in places]


def _ahead(comm: Communicator, peer: int, clock: Clock) -> float:
    """Return on rank 0 how far the peer's clock is ahead."""
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
    """Return how far a clock is ahead, from triples: asked here, what it said, answer here."""
    asked, said, answered = min(answers, key=lambda each: each[2] - each[0])
    return said - (asked + answered) / 2
