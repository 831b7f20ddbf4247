"""Topology of a communicator: its nodes and the ranks on each."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpctrain.comm.transport.base import Transport


@dataclass(frozen=True)
class Topology:
    """Position of a rank: node index, number of nodes, local rank, and all ranks per node.

    ``grid[node][local_rank]`` is a rank of the communicator. The last field marks oversubscription:
    a node has more ranks than cores available to them, so that they progress only after the
    operating system has scheduled each of them.
    """

    node: int
    nodes: int
    local_rank: int
    local_size: int
    grid: tuple[tuple[int, ...], ...]
    oversubscribed: bool = False

    @property
    def uniform(self) -> bool:
        """Return whether all nodes have the same number of ranks."""
        return len({len(ranks) for ranks in self.grid}) == 1


def discover(transport: Transport, node: Transport) -> Topology:
    """Return the topology of a transport; ``node`` is the part of it on this rank's node. Collective.

    Nodes are numbered by their lowest rank.
    """
    leader = node.broadcast_object(transport.rank)
    everyone = transport.all_gather_object((leader, node.rank, _cores()))
    leaders = sorted({leader for leader, *_ in everyone})
    grid = [[rank for rank, (other, *_) in enumerate(everyone) if other == leader] for leader in leaders]
    for ranks in grid:
        ranks.sort(key=lambda rank: everyone[rank][1])
    oversubscribed = any(len(ranks) > len(frozenset().union(*(everyone[rank][2] for rank in ranks))) for ranks in grid)
    return Topology(leaders.index(leader), len(leaders), node.rank, node.size, tuple(map(tuple, grid)), oversubscribed)


def _cores() -> frozenset[int]:
    """Return the cores that this rank may run on; a rank may be bound to a subset of the node's cores."""
    return frozenset(os.sched_getaffinity(0))
