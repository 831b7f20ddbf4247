"""Collectives in node-shared memory, extended by messages between nodes if there are several.

The module is imported at first use: a world of one rank needs neither shared memory nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.comm.reduction import Reducer
from hpctrain.comm.shm.hierarchical import HierarchicalShares
from hpctrain.comm.shm.in_place import WindowShares
from hpctrain.comm.shm.progress import NodeQueue, Share
from hpctrain.comm.shm.staged import StagedCollectives
from hpctrain.comm.topology import Topology
from hpctrain.comm.transport.base import Recorder, Transport, Work
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.window import NodeMemory, NoSpaceError

CHUNK = 4 * 2**20  # bytes per chunk of a private tensor that is staged through node memory for other nodes

Way = Callable[[], object]


class NodeCollectives:
    """Collectives in the memory of this rank's node. Construction is collective over ``transport``.

    Methods return a prepared call, which is created once and reused: creating its views costs more
    than the reduction of a small tensor.
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
        """Return a flat tensor in this rank's part of the memory. Collective."""
        buffer, offset = self.memory.allocate(max(numel, 1) * dtype.itemsize)
        return buffer.views(offset, numel, dtype)[self.memory.rank]

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that all ranks of the node share. Collective."""
        return self.memory.allocate_common(max(numel, 1) * dtype.itemsize).views(0, numel, dtype)[0]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a contiguous host tensor is stored in this memory."""
        return self.memory.find(tensor) is not None

    def name_of(self, tensor: Tensor) -> str:
        """Return the location of a tensor in this memory as text, the same on all ranks; empty for other tensors."""
        found = self.memory.find(tensor)
        return "" if found is None else f"node memory {self.memory.number_of(found[0])} at byte {found[1]}"

    def is_common(self, tensor: Tensor) -> bool:
        """Return whether all ranks of the node share a tensor of this memory."""
        found = self.memory.find(tensor)
        return found is not None and found[0].common

    def share_recorder(self, recorder: Recorder | None) -> None:
        """Set the recorder that counts calls and bytes."""
        self.memory.recorder = recorder
        if self._across is not None:
            self._across.recorder = recorder

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._across is not None:
            self._across.free()
        self.memory.free()

    # Collectives of tensors in this memory ----------------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor, op: str) -> Callable[[], Work]:
        """Return a prepared call that starts the reduction of a tensor of ``empty``."""
        share = self._shares.all_reduce(self._views(tensor), op)
        return lambda: self._queue.start("all_reduce", share)

    def all_reduce(self, tensor: Tensor, op: str) -> Way:
        """Return a prepared call that reduces a tensor of ``empty``."""
        return self._run("all_reduce", self._shares.all_reduce(self._views(tensor), op))

    def reduce(self, tensor: Tensor, op: str, root: int) -> Way:
        """Return a prepared call that reduces a tensor of ``empty`` into the root's, on one node."""
        return self._run("reduce", self._inside.reduce(self._views(tensor), op, root))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Way:
        """Return a prepared call that reduces a tensor of ``empty`` and stores a share in any memory."""
        return self._run("reduce_scatter", self._shares.reduce_scatter(out, self._views(tensor), op))

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Callable[[Tensor], Work]:
        """Return a prepared call that starts ``reduce_scatter`` into a tensor at the address of ``out``."""
        share = self._shares.reduce_scatter(out, self._views(tensor), op)
        return lambda out: self._queue.start("reduce_scatter", share, out)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Way:
        """Return a prepared call that gathers shares, in any memory, into a tensor of ``empty`` or ``common``."""
        views = self._views(out)
        if not self.is_common(out):
            return self._run("all_gather", self._shares.all_gather(views, tensor))
        if self._across is None and tensor.data_ptr() - out.data_ptr() == self.memory.rank * tensor.nbytes:
            return lambda: self._queue.meet("all_gather")
        return self._run("all_gather", self._shares.all_gather(views, tensor))

    def broadcast(self, tensor: Tensor, root: int) -> Way:
        """Return a prepared call that broadcasts a tensor of ``empty``."""
        return self._run("broadcast", self._shares.broadcast(self._views(tensor), root))

    # Collectives of other tensors -------------------------------------------------------------------------------------

    @property
    def staged(self) -> StagedCollectives:
        """Return the collectives of private tensors, for one node. The first access is collective."""
        if self._staged is None:
            self._staged = StagedCollectives(self._queue, self._reducer)
        return self._staged

    def all_reduce_in_chunks(self, tensor: Tensor, op: str) -> Way:
        """Return a prepared call that reduces a private tensor over several nodes."""
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

    # Implementation ---------------------------------------------------------------------------------------------------

    def _run(self, operation: str, share: Share) -> Way:
        queue = self._queue
        return lambda: queue.run(operation, share)

    def _views(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return views of the same segment in the memory of every local rank."""
        found = self.memory.find(tensor)
        assert found is not None, "the caller has checked that the tensor is in node memory"
        buffer, offset = found
        return buffer.views(offset, tensor.numel(), tensor.dtype)
