"""Carry out collectives in memory that the ranks of a node share, and between the nodes where there are several.

Loaded at first use: a world of one rank needs neither memory to share nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.collectives.node.hierarchical import HierarchicalShares
from hpctrain.collectives.node.queue import NodeQueue, Share
from hpctrain.collectives.node.staged import StagedCollectives
from hpctrain.collectives.node.window import WindowShares
from hpctrain.collectives.reduction import Reducer
from hpctrain.collectives.topology import Topology
from hpctrain.transport.base import Transport, Work
from hpctrain.transport.mpi import MpiTransport
from hpctrain.transport.recorder import Recorder
from hpctrain.transport.shm_space import NoSpaceError
from hpctrain.transport.window import NodeMemory

CHUNK = 4 * 2**20  # bytes that a tensor of a rank's own memory goes through at once on its way to other nodes

Way = Callable[[], object]


class NodeCollectives:
    """Hold the memory of this rank's node; all ranks of ``transport`` make it together.

    Methods return a way to carry an operation out, made once and used often: making the views that it needs costs more
    than reducing a small tensor.
    """

    def __init__(self, transport: Transport, node: MpiTransport, place: Topology, reducer: Reducer) -> None:
        self.nodes = place.nodes
        ranks = node.split_node()
        everyone = transport if place.nodes > 1 else ranks
        assert isinstance(everyone, MpiTransport), "several nodes are joined by MPI"
        try:
            self.memory = NodeMemory(ranks, crowded=place.crowded, everyone=everyone)
        except NoSpaceError:
            ranks.free()
            raise
        self._queue = NodeQueue(self.memory)
        self._reducer = reducer
        inside = WindowShares(place.local_rank, place.local_size, self.memory, reducer)
        self._across: Transport | None = None
        self._shares: WindowShares | HierarchicalShares = inside
        if place.nodes > 1:
            self._across = transport.split(place.local_rank, place.node)
            self._shares = HierarchicalShares(inside, self._across, place.grid)
        self._inside = inside
        self._staged: StagedCollectives | None = None
        self._chunk: Tensor | None = None

    # Memory -----------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in this rank's part of the memory; a call by all ranks."""
        buffer, offset = self.memory.allocate(max(numel, 1) * dtype.itemsize)
        return buffer.views(offset, numel, dtype)[self.memory.rank]

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that is one and the same for all ranks of the node; a call by all ranks."""
        return self.memory.allocate_common(max(numel, 1) * dtype.itemsize).views(0, numel, dtype)[0]

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a contiguous host tensor lies in this memory."""
        return self.memory.find(tensor) is not None

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor's place in this memory, the same on all ranks; empty for one elsewhere."""
        found = self.memory.find(tensor)
        return "" if found is None else f"node memory {self.memory.number_of(found[0])} at byte {found[1]}"

    def is_common(self, tensor: Tensor) -> bool:
        """Tell whether a tensor of this memory is one and the same for all ranks."""
        found = self.memory.find(tensor)
        return found is not None and found[0].common

    def share_recorder(self, recorder: Recorder | None) -> None:
        """Count into a recorder."""
        self.memory.recorder = recorder
        if self._across is not None:
            self._across.recorder = recorder

    def free(self) -> None:
        """Give the memory back; a call by all ranks."""
        if self._across is not None:
            self._across.free()
        self.memory.free()

    # Collectives of tensors that lie in this memory -------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor, op: str) -> Callable[[], Work]:
        """Return the way to start the reduction of a tensor of ``empty``."""
        share = self._shares.all_reduce(self._views(tensor), op)
        return lambda: self._queue.start("all_reduce", share)

    def all_reduce(self, tensor: Tensor, op: str) -> Way:
        """Return the way to reduce a tensor of ``empty``."""
        return self._run("all_reduce", self._shares.all_reduce(self._views(tensor), op))

    def reduce(self, tensor: Tensor, op: str, root: int) -> Way:
        """Return the way to reduce a tensor of ``empty`` into the root's, on one node."""
        return self._run("reduce", self._inside.reduce(self._views(tensor), op, root))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Way:
        """Return the way to reduce a tensor of ``empty``, and keep a share in any memory."""
        return self._run("reduce_scatter", self._shares.reduce_scatter(out, self._views(tensor), op))

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Callable[[Tensor], Work]:
        """Return the way to start what ``reduce_scatter`` does, of the tensor that lies where ``out`` does."""
        share = self._shares.reduce_scatter(out, self._views(tensor), op)
        return lambda out: self._queue.start("reduce_scatter", share, out)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Way:
        """Return the way to gather shares, in any memory, in a tensor of ``empty`` or ``common``."""
        views = self._views(out)
        if not self.is_common(out):
            return self._run("all_gather", self._shares.all_gather(views, tensor))
        if self._across is None and tensor.data_ptr() - out.data_ptr() == self.memory.rank * tensor.nbytes:
            return lambda: self._queue.meet("all_gather")
        return self._run("all_gather", self._shares.all_gather(views, tensor))

    def broadcast(self, tensor: Tensor, root: int) -> Way:
        """Return the way to broadcast a tensor of ``empty``."""
        return self._run("broadcast", self._shares.broadcast(self._views(tensor), root))

    # Collectives of other tensors -------------------------------------------------------------------------------------

    @property
    def staged(self) -> StagedCollectives:
        """Return the collectives of tensors in a rank's own memory, for one node; at first use a call by all ranks."""
        if self._staged is None:
            self._staged = StagedCollectives(self._queue, self._reducer)
        return self._staged

    def all_reduce_in_chunks(self, tensor: Tensor, op: str) -> Way:
        """Return the way to reduce a tensor of a rank's own memory over several nodes."""
        if self._chunk is None:
            self._chunk = self.empty(CHUNK, torch.uint8)
        room = self._chunk.view(tensor.dtype)
        pieces = torch.split(tensor, room.numel())
        ways = {piece.numel(): self.all_reduce(room[: piece.numel()], op) for piece in (pieces[0], pieces[-1])}

        def way() -> None:
            for piece in pieces:
                place = room[: piece.numel()]
                place.copy_(piece)
                ways[piece.numel()]()
                piece.copy_(place)

        return way

    # How --------------------------------------------------------------------------------------------------------------

    def _run(self, operation: str, share: Share) -> Way:
        queue = self._queue
        return lambda: queue.run(operation, share)

    def _views(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the same piece of all local ranks' memory."""
        found = self.memory.find(tensor)
        assert found is not None, "who asks has looked whether the tensor lies in node memory"
        buffer, offset = found
        return buffer.views(offset, tensor.numel(), tensor.dtype)
