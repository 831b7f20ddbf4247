"""Tell which ranks of a communicator share a node."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpctrain.transport.base import Transport


@dataclass(frozen=True)
class Topology:
    """Place a rank: its node among ``nodes``, its place there, and whether all nodes hold equally many ranks.

    ``grid[node][local_rank]`` is a rank of the communicator. ``crowded`` says that a node has more ranks than cores for
    them, so that they meet only after the system has let each of them run.
    """

    node: int
    nodes: int
    local_rank: int
    local_size: int
    grid: tuple[tuple[int, ...], ...]
    crowded: bool = False

    @property
    def uniform(self) -> bool:
        """Tell whether all nodes hold equally many ranks."""
        return len({len(ranks) for ranks in self.grid}) == 1


def discover(transport: Transport, node: Transport) -> Topology:
    """Return the topology of a transport, of which ``node`` is this rank's part; a call by all ranks.

    Nodes are numbered by their lowest rank.
    """
    leader = node.broadcast_object(transport.rank)
    everyone = transport.all_gather_object((leader, node.rank, _cores()))
    leaders = sorted({leader for leader, *_ in everyone})
    grid = [[rank for rank, (other, *_) in enumerate(everyone) if other == leader] for leader in leaders]
    for ranks in grid:
        ranks.sort(key=lambda rank: everyone[rank][1])
    crowded = any(len(ranks) > len(frozenset().union(*(everyone[rank][2] for rank in ranks))) for ranks in grid)
    return Topology(leaders.index(leader), len(leaders), node.rank, node.size, tuple(map(tuple, grid)), crowded)


def _cores() -> frozenset[int]:
    """Return the cores that this rank may run on; it may be bound to some of the node's."""
    return frozenset(os.sched_getaffinity(0))
