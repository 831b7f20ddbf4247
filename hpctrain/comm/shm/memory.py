"""Nodes of a communicator's ranks, and lifecycle of the memory that ranks share on their node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.reduction import Reducer
from hpctrain.comm.transport.base import Recorder, Transport
from hpctrain.errors import CommunicationError
from hpctrain.log import logger

if TYPE_CHECKING:
    from hpctrain.comm.shm.collectives import NodeCollectives
    from hpctrain.comm.transport.reserve import Window


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
    # A rank may be bound to a subset of the node's cores.
    everyone = transport.all_gather_object((leader, node.rank, frozenset(os.sched_getaffinity(0))))
    leaders = sorted({leader for leader, *_ in everyone})
    grid = [[rank for rank, (other, *_) in enumerate(everyone) if other == leader] for leader in leaders]
    for ranks in grid:
        ranks.sort(key=lambda rank: everyone[rank][1])
    oversubscribed = any(len(ranks) > len(frozenset().union(*(everyone[rank][2] for rank in ranks))) for ranks in grid)
    return Topology(leaders.index(leader), len(leaders), node.rank, node.size, tuple(map(tuple, grid)), oversubscribed)


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks of this node, as bytes by rank of the communicator; all of them can read and write it.

    The memory of a rank remains readable when the rank has died. It is freed when it is no longer referenced.
    """

    ranks: dict[int, Tensor]
    window: Window | None = None


# Shared memory, from first use to release -----------------------------------------------------------------------------

# Operations that private tensors can perform through node memory: on one node, and over several.
STAGED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
STAGED_ACROSS = ("all_reduce",)


class SharedMemory:
    """Node-shared memory of a communicator: availability, location of tensors, and applicable algorithms."""

    def __init__(self, transport: Transport, node: Transport, topology: Topology, reducer: Reducer) -> None:
        self.topology = topology
        self._unavailable = _why_unavailable(topology)
        self._transport = transport
        self._node = node
        self._reducer = reducer
        self._collectives: NodeCollectives | None = None
        self._warned = False

    @property
    def exists(self) -> bool:
        """Return whether ranks share memory."""
        return not self._unavailable

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm that operates in this memory."""
        return "window" if self.topology.nodes == 1 else "hierarchical"

    @property
    def node(self) -> NodeCollectives:
        """Return the collectives in this memory. The first access is collective."""
        if self._collectives is None:
            from hpctrain.comm.shm.collectives import NodeCollectives
            from hpctrain.comm.transport.mpi import MpiTransport

            assert isinstance(self._node, MpiTransport), "only MPI has nodes of several ranks"
            self._collectives = NodeCollectives(self._transport, self._node, self.topology, self._reducer)
            self.share_recorder(self._transport.recorder)
        return self._collectives

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool, must_share: bool = False) -> Tensor:
        """Return a flat tensor in this memory if it exists; with ``common`` all ranks of the node share the tensor.

        If no space is left, the tensor is in the rank's private memory, or, with ``must_share``,
        all ranks raise.
        """
        if self.exists:
            try:
                return self.node.common(numel, dtype) if common else self.node.empty(numel, dtype)
            except CommunicationError as error:
                if must_share or not self.lacks_space(error):
                    raise
        return torch.empty(numel, dtype=dtype)

    def of_each_rank(self, nbytes: int) -> RankMemory:
        """Return memory of ``nbytes`` zeroed bytes for each rank. Collective.

        Raises ``NoSpaceError`` on all ranks if a node has too little space left.
        """
        from hpctrain.comm.transport.mpi import MpiTransport

        if not isinstance(self._transport, MpiTransport) or not isinstance(self._node, MpiTransport):
            return RankMemory({0: torch.zeros(nbytes, dtype=torch.uint8)})
        from hpctrain.comm.transport.reserve import reserve_window

        transport, ranks = self._transport, self.topology.grid[self.topology.node]
        window = reserve_window(self._node.comm, nbytes, lambda here: all(transport.all_gather_object(here)))
        parts = (window.Shared_query(number)[0] for number in range(len(ranks)))
        memory = RankMemory(
            {rank: torch.frombuffer(part, dtype=torch.uint8, count=nbytes) for rank, part in zip(ranks, parts)}, window
        )
        memory.ranks[transport.rank].zero_()
        transport.barrier()
        return memory

    def has_space(self, nbytes: int) -> bool:
        """Return whether all nodes have this many bytes of shared memory left; warn if not. Collective."""
        from hpctrain.comm.transport.reserve import missing_space

        if not self.exists:
            return False
        errors = [error for error in self._transport.all_gather_object(missing_space(nbytes)) if error is not None]
        return not (errors and self.lacks_space(errors[0]))

    def lacks_space(self, error: CommunicationError) -> bool:
        """Return whether an error (common to all ranks) means that /dev/shm is full; warn about it once, on rank 0."""
        from hpctrain.comm.transport.reserve import NoSpaceError

        if not isinstance(error, NoSpaceError):
            return False
        if self._transport.rank == 0 and not self._warned:
            logger.warning("%s; messages carry it instead, which is slower", error)
        self._warned = True
        return True

    def location_of(self, tensor: Tensor) -> str:
        """Return the location of a contiguous host tensor: ``window``, or ``host`` for private memory."""
        collectives = self._collectives
        return "host" if collectives is None or collectives.memory.find(tensor) is None else "window"

    def name_of(self, tensor: Tensor) -> str:
        """Return the location of a tensor in this memory as text, the same on all ranks; empty for other tensors."""
        if self._collectives is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return ""
        return self._collectives.memory.name_of(tensor)

    def why_unavailable(self, algorithm: str, operation: str, location: str) -> str:
        """Return why an algorithm of node memory is not applicable; empty if it is."""
        if self._unavailable:
            return self._unavailable
        if algorithm == "window" and self.topology.nodes > 1:
            return f"the ranks are on {self.topology.nodes} nodes, which is what hierarchical is for"
        if location != "window" and operation not in (STAGED if self.topology.nodes == 1 else STAGED_ACROSS):
            return "it needs a tensor of comm.empty()"
        return ""

    def share_recorder(self, recorder: Recorder | None) -> None:
        """Set the recorder that counts traffic through this memory and between the nodes."""
        if self._collectives is not None:
            self._collectives.share_recorder(recorder)

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._collectives is not None:
            self._collectives.free()
        self._collectives = None


def _why_unavailable(topology: Topology) -> str:
    """Return why the ranks share no memory; empty if they do."""
    if max(map(len, topology.grid)) == 1:
        return "no two ranks share a node"
    # Nodes with unequal numbers of ranks would cut a tensor into unequal slices, which do not match
    # across nodes.
    return "" if topology.uniform else "the nodes hold unequal numbers of ranks"
