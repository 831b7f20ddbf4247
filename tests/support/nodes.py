"""Placement of the ranks of one machine on several simulated nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.comm.communicator import Communicator

NodeOfRank = Callable[[int], int]  # the node of a rank


def in_pairs(rank: int) -> int:
    """Place ranks 0 and 1 on the first node, 2 and 3 on the second: unequal nodes if the last rank is alone."""
    return rank // 2


def alternating(rank: int) -> int:
    """Place the ranks on two nodes alternately."""
    return rank % 2


def one_per_node(rank: int) -> int:
    """Place every rank on a node of its own."""
    return rank


def groups(node_of_rank: NodeOfRank, size: int) -> list[list[int]]:
    """Return the ranks of every node."""
    nodes: dict[int, list[int]] = {}
    for rank in range(size):
        nodes.setdefault(node_of_rank(rank), []).append(rank)
    return list(nodes.values())


def by_node(comm: Any) -> list[list[int]]:
    """Return the ranks of every node of a communicator."""
    seen = comm.all_gather_object(comm.node)
    return groups(lambda rank: seen[rank], comm.size)


def by_memory(comm: Any) -> str:
    """Return the algorithm that uses the shared memory of a communicator's nodes."""
    return "window" if comm.nodes == 1 else "hierarchical"


def on_nodes(comm: Any, node_of_rank: NodeOfRank) -> Communicator:
    """Return another communicator of the same ranks, on the nodes given by ``node_of_rank``; the caller frees it.

    Skips the test if ranks on one node cannot share memory.
    """
    from hpctrain.comm.transport.mpi import MpiTransport

    real = by_node(comm)
    if not all(any(set(group) <= set(node) for node in real) for group in groups(node_of_rank, comm.size)):
        pytest.skip("the ranks sit on several nodes, and in another way")

    class SimulatedNodes(MpiTransport):
        def split_node(self) -> MpiTransport:
            node = self.split(node_of_rank(self.rank), self.rank)
            assert isinstance(node, MpiTransport)
            return node

    return Communicator(SimulatedNodes(comm.transport.comm))
