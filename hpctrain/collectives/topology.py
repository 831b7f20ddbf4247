"""Tell which ranks of a communicator share a node."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.transport.base import Transport


@dataclass(frozen=True)
class Topology:
    """Place a rank: its node among ``nodes``, its place there, and whether all nodes hold equally many ranks."""

    node: int
    nodes: int
    local_rank: int
    local_size: int
    uniform: bool


def discover(transport: Transport, node: Transport) -> Topology:
    """Return the topology of a transport, of which ``node`` is this rank's part; a call by all ranks.

    Nodes are numbered by their lowest rank.
    """
    leader = node.broadcast_object(transport.rank)
    everyone = transport.all_gather_object((leader, node.size))
    leaders = sorted({leader for leader, _ in everyone})
    uniform = len({size for _, size in everyone}) == 1
    return Topology(leaders.index(leader), len(leaders), node.rank, node.size, uniform)
