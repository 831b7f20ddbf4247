"""Collectives in node-shared memory, extended by messages between nodes if there are several.

The module is imported at first use: a world of one rank needs neither shared memory nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.reduction import Reducer
from hpctrain.comm.shm.hierarchical import HierarchicalParts
from hpctrain.comm.shm.in_place import WindowParts
from hpctrain.comm.shm.progress import LocalPart, NodeQueue
from hpctrain.comm.shm.staged import StagedCollectives
from hpctrain.comm.topology import Topology
from hpctrain.comm.transport.base import PreparedCall, Recorder, Transport, Work
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.window import NodeMemory, NoSpaceError

CHUNK = 4 * 2**20  # bytes per chunk of a private tensor that is staged through node memory for other nodes


class NodeCollectives:
    """Collectives in the memory of this rank's node. Construction is collective over ``transport``.

    ``prepare`` returns a call that is created once and reused: creating its views costs more than
    the reduction of a small tensor.
    """

    def __init__(self, transport: Transport, node: MpiTransport, topology: Topology, reducer: Reducer) -> None:
        self.nodes = topology.nodes
        ranks = node.split_node()
        everyone = transport if topology.nodes > 1 else ranks
        assert isinstance(everyone, MpiTransport), "several nodes are joined by MPI"
        try:
            self.memory = NodeMemory(ranks, oversubscribed=topology.oversubscribed, everyone=everyone)
        except NoSpaceError:
            ranks.free()
            raise
        self._queue = NodeQueue(self.memory)
        self._reducer = reducer
        inside = WindowParts(topology.local_rank, topology.local_size, self.memory, reducer)
        self._across: Transport | None = None
        self._parts: WindowParts | HierarchicalParts = inside
        if topology.nodes > 1:
            self._across = transport.split(topology.local_rank, topology.node)
            self._parts = HierarchicalParts(inside, self._across, topology.grid)
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

    # Collectives ------------------------------------------------------------------------------------------------------

    def prepare(self, operation: str, whole: Tensor, arguments: Sequence[Any]) -> PreparedCall:
        """Return a prepared call of a collective; ``whole`` is the one of its tensors that may be in this memory.

        Other tensors are staged through this memory. The first such call is collective.
        """
        if self.holds(whole):
            part: LocalPart | None = getattr(self, f"_{operation}")(*arguments)
            return partial(self._queue.synchronize, operation) if part is None else self._run(operation, part)
        if self.nodes > 1:
            assert operation == "all_reduce", "over several nodes, the caller stages reductions only"
            return self._all_reduce_in_chunks(*arguments)
        if self._staged is None:
            self._staged = StagedCollectives(self._queue, self._reducer)
        call: PreparedCall = getattr(self._staged, operation)(*arguments)
        return call

    def prepare_start(self, operation: str, arguments: Sequence[Any]) -> Callable[..., Work]:
        """Return a prepared call that starts a reduction of a tensor of ``empty``.

        The arguments of that call are tensors to keep until the reduction has completed.
        """
        return partial(self._queue.start, operation, getattr(self, f"_{operation}")(*arguments))

    # Part of this rank in a collective of tensors in this memory ------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> LocalPart:
        return self._parts.all_reduce(self._views(tensor), op)

    def _reduce(self, tensor: Tensor, op: str, root: int) -> LocalPart:
        return self._inside.reduce(self._views(tensor), op, root)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> LocalPart:
        return self._parts.reduce_scatter(out, self._views(tensor), op)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> LocalPart | None:
        """Return this rank's part; None if all shares are in their places in a tensor of ``common``."""
        if self.is_common(out) and self._across is None:
            if tensor.data_ptr() - out.data_ptr() == self.memory.rank * tensor.nbytes:
                return None
        return self._parts.all_gather(self._views(out), tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> LocalPart:
        return self._parts.broadcast(self._views(tensor), root)

    # Implementation ---------------------------------------------------------------------------------------------------

    def _all_reduce_in_chunks(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces a private tensor over several nodes."""
        if self._chunk is None:
            self._chunk = self.empty(CHUNK, torch.uint8)
        buffer = self._chunk.view(tensor.dtype)
        pieces = torch.split(tensor, buffer.numel())
        lengths = {pieces[0].numel(), pieces[-1].numel()}
        calls = {numel: self._run("all_reduce", self._all_reduce(buffer[:numel], op)) for numel in lengths}

        def reduce_in_chunks() -> None:
            for piece in pieces:
                chunk = buffer[: piece.numel()]
                chunk.copy_(piece)
                calls[piece.numel()]()
                piece.copy_(chunk)

        return reduce_in_chunks

    def _run(self, operation: str, part: LocalPart) -> PreparedCall:
        return partial(self._queue.run, operation, part)

    def _views(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return views of the same segment in the memory of every local rank."""
        found = self.memory.find(tensor)
        assert found is not None, "the caller has checked that the tensor is in node memory"
        buffer, offset = found
        return buffer.views(offset, tensor.numel(), tensor.dtype)
