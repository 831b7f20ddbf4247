"""Topology: assignment of ranks to nodes."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from support.nodes import NodeOfRank, alternating, groups, in_pairs, on_nodes, one_per_node

from hpctrain.comm.shm.memory import Topology, discover
from hpctrain.comm.transport.base import SingleTransport


def test_one_rank_is_one_node() -> None:
    assert discover(SingleTransport(), SingleTransport()) == Topology(0, 1, 0, 1, ((0,),))


@pytest.mark.ranks
def test_ranks_of_one_machine_share_a_node(comm: Any) -> None:
    names = comm.all_gather_object(socket.gethostname())
    here = [rank for rank, name in enumerate(names) if name == names[comm.rank]]
    assert (comm.local_rank, comm.local_size) == (here.index(comm.rank), len(here))
    assert (comm.node, comm.nodes) == (list(dict.fromkeys(names)).index(names[comm.rank]), len(set(names)))
    assert comm.uniform == (len({names.count(name) for name in names}) == 1)


@pytest.mark.ranks
@pytest.mark.parametrize("node_of_rank", [in_pairs, alternating, one_per_node, lambda rank: -rank])
def test_nodes_are_numbered_by_their_lowest_rank(comm: Any, node_of_rank: NodeOfRank) -> None:
    spread = on_nodes(comm, lambda rank: node_of_rank(rank) % 8)
    nodes = sorted(groups(node_of_rank, comm.size))
    node = next(number for number, ranks in enumerate(nodes) if comm.rank in ranks)
    assert (spread.node, spread.nodes) == (node, len(nodes))
    assert (spread.local_rank, spread.local_size) == (nodes[node].index(comm.rank), len(nodes[node]))
    assert spread.uniform == (len(set(map(len, nodes))) == 1)
    spread.free()
