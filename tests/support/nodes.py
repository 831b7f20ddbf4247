"""Make the ranks of one machine believe that they sit on several nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.collectives.communicator import Communicator

Placing = Callable[[int], int]  # the node of a rank


def in_pairs(rank: int) -> int:
    """Place ranks 0 and 1 on the first node, 2 and 3 on the second: unequal nodes where the last rank is alone."""
    return rank // 2


def dealt_out(rank: int) -> int:
    """Place the ranks on two nodes in turn."""
    return rank % 2


def alone(rank: int) -> int:
    """Place every rank on a node of its own."""
    return rank


def groups(placing: Placing, size: int) -> list[list[int]]:
    """Return the ranks of every node."""
    nodes: dict[int, list[int]] = {}
    for rank in range(size):
        nodes.setdefault(placing(rank), []).append(rank)
    return list(nodes.values())


def placed(comm: Any, placing: Placing) -> Communicator:
    """Return another communicator of the same ranks, on the nodes that ``placing`` says; to be freed by the caller."""
    from hpctrain.transport.mpi import MpiTransport

    class Placed(MpiTransport):
        def split_node(self) -> MpiTransport:
            node = self.split(placing(self.rank), self.rank)
            assert isinstance(node, MpiTransport)
            return node

    return Communicator(Placed(comm.transport.comm))
