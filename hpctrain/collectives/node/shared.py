"""Own the memory that a communicator's ranks share with their node, from its first use to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.collectives.reduction import Reducer
from hpctrain.collectives.topology import Topology
from hpctrain.errors import CommunicationError
from hpctrain.log import logger
from hpctrain.transport.base import Transport
from hpctrain.transport.recorder import Recorder

if TYPE_CHECKING:
    from hpctrain.collectives.node.collectives import NodeCollectives


# What tensors of a rank's own memory can go through node memory for: on one node, and over several.
STAGED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
STAGED_ACROSS = ("all_reduce",)


class SharedMemory:
    """Say whether there is memory to share, which tensors lie in it, and what it can do."""

    def __init__(self, transport: Transport, node: Transport, place: Topology, reducer: Reducer) -> None:
        self.place = place
        self._transport = transport
        self._node = node
        self._reducer = reducer
        self._made: NodeCollectives | None = None
        self._warned = False

    @property
    def exists(self) -> bool:
        """Tell whether ranks share memory."""
        return not self._hindrance()

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm that works in it."""
        return "window" if self.place.nodes == 1 else "hierarchical"

    @property
    def node(self) -> NodeCollectives:
        """Return what carries operations out there; all ranks make it together, at first use."""
        if self._made is None:
            from hpctrain.collectives.node.collectives import NodeCollectives
            from hpctrain.transport.mpi import MpiTransport

            assert isinstance(self._node, MpiTransport), "only MPI has nodes of several ranks"
            self._made = NodeCollectives(self._transport, self._node, self.place, self._reducer)
            self.share_recorder(self._transport.recorder)
        return self._made

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool, must_share: bool = False) -> Tensor:
        """Return a flat tensor in this memory, where it exists; ``common``: one and the same for the node's ranks.

        If there is no space left for it, it lies in the rank's own memory, or, with ``must_share``, all ranks raise.
        """
        if self.exists:
            try:
                return self.node.common(numel, dtype) if common else self.node.empty(numel, dtype)
            except CommunicationError as error:
                if must_share or not self.lacks_space(error):
                    raise
        return torch.empty(numel, dtype=dtype)

    def has_space(self, nbytes: int) -> bool:
        """Return whether all nodes have so much of this memory left; warn if not. A call by all ranks."""
        from hpctrain.transport.shm_space import missing_space

        if not self.exists:
            return False
        errors = [error for error in self._transport.all_gather_object(missing_space(nbytes)) if error is not None]
        return not (errors and self.lacks_space(errors[0]))

    def lacks_space(self, error: CommunicationError) -> bool:
        """Return whether an error, which all ranks have, is that /dev/shm is full; warn of that once, on rank 0."""
        from hpctrain.transport.shm_space import NoSpaceError

        if not isinstance(error, NoSpaceError):
            return False
        if self._transport.rank == 0 and not self._warned:
            logger.warning("%s; messages carry it instead, which is slower", error)
        self._warned = True
        return True

    def place_of(self, tensor: Tensor) -> str:
        """Return where a contiguous host tensor lies: in the ``window``, or elsewhere on the ``host``."""
        return "window" if self._made is not None and self._made.holds(tensor) else "host"

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor's place in this memory, the same on all ranks; empty for one elsewhere."""
        if self._made is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return ""
        return self._made.name_of(tensor)

    def why_not(self, algorithm: str, operation: str, place: str) -> str:
        """Return why an algorithm of node memory cannot serve; empty where it can."""
        hindrance = self._hindrance()
        if hindrance:
            return hindrance
        if algorithm == "window" and self.place.nodes > 1:
            return f"the ranks are on {self.place.nodes} nodes, which is what hierarchical is for"
        if place != "window" and operation not in (STAGED if self.place.nodes == 1 else STAGED_ACROSS):
            return "it needs a tensor of comm.empty()"
        return ""

    def share_recorder(self, recorder: Recorder | None) -> None:
        """Count what goes through this memory, and between the nodes, into a recorder."""
        if self._made is not None:
            self._made.share_recorder(recorder)

    def free(self) -> None:
        """Give the memory back; a call by all ranks."""
        if self._made is not None:
            self._made.free()
        self._made = None

    def _hindrance(self) -> str:
        if max(map(len, self.place.grid)) == 1:
            return "no two ranks share a node"
        # Nodes with unequal numbers of ranks would cut a tensor into unequal slices, which cannot meet across nodes.
        return "" if self.place.uniform else "the nodes hold unequal numbers of ranks"
