"""Collectives in node-shared memory; over several nodes, two-level collectives with one slice per local rank.

Each local rank is the leader of one slice, so that all ranks drive the network concurrently and no
byte crosses it twice (Bayatpour et al., "Scalable Reduction Collectives with Data
Partitioning-based Multi-Leader Design", SC 2017). With N nodes of L ranks and S bytes per rank, an
all_reduce moves 2 S bytes of node memory per rank. Each rank sends 2 (N-1)/N S/L bytes to other
nodes. A node thus sends 2 (N-1)/N S, the lower bound for any algorithm. Cost: two synchronisations
in the node + S / B + 2 (N-1) alpha + 2 (N-1)/N S beta, with beta the seconds per byte of the node's
link and B the streaming rate of a core.

Note: the pipeline of an all_reduce. The slice is cut into pieces. While piece k is sent to the
nodes that reduce it, piece k + 1 is reduced in the node, and piece k - 1 is sent back: both link
and memory stay busy. The order is fixed, so messages need no sequence numbers.

Works that wait for another node are yielded and remain in progress (``NodeQueue``).

The module is imported at first use: a world of one rank needs neither shared memory nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, recursive, tree
from hpctrain.comm.algorithms.base import TAG, exchange, slices
from hpctrain.comm.reduction import BLOCK, Reducer, average_scale
from hpctrain.comm.shm.in_place import LocalPart, NodeQueue, WindowParts
from hpctrain.comm.shm.staged import StagedCollectives
from hpctrain.comm.transport.base import PreparedCall, Recorder, Transport, Work
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.reserve import NoSpaceError
from hpctrain.comm.transport.window import NodeMemory

if TYPE_CHECKING:
    from hpctrain.comm.shm.memory import Topology

PIECE = 2**19  # bytes of a slice per message: long enough for a link's full rate
CHUNK = 4 * 2**20  # bytes per chunk of a private tensor that is staged through node memory for other nodes
FEW_NODES = 8  # up to this number every node sends to all others at once; more nodes use halving and doubling


class HierarchicalParts:
    """Work of one local rank; ``across`` connects the ranks with the same local rank on all nodes.

    ``inside`` provides the work within a node. ``grid[node][local rank]`` is a rank of the whole
    communicator, and ``across`` numbers its ranks by node.
    """

    def __init__(
        self,
        inside: WindowParts,
        across: Transport,
        grid: Sequence[Sequence[int]],
        few_nodes: int,
        piece: int,
    ) -> None:
        self._few_nodes, self._piece = few_nodes, piece
        self._inside = inside
        self._across = across
        self._grid = grid
        self._members = [ranks[inside.rank] for ranks in grid]  # ranks that ``across`` connects

    def all_reduce(self, views: Sequence[Tensor], op: str) -> LocalPart:
        """Reduce this rank's slice in the node and across nodes, and write the result into all local buffers."""
        pieces = self._inside.slices(views)
        own = pieces[self._inside.rank]
        is_direct = self._across.size <= self._few_nodes
        step = self._piece // own.itemsize if is_direct else max(own.numel(), 1)
        rows = list(zip(*(torch.split(piece, step) for piece in pieces)))
        return lambda: self._pipelined(rows, op) if is_direct else self._by_halving(rows, op)

    def reduce_scatter(self, out: Tensor, views: Sequence[Tensor], op: str) -> LocalPart:
        """Reduce, first in the node and then across nodes, the shares of the ranks that ``across`` connects."""
        share = out.numel()
        parts = [[view[rank * share : (rank + 1) * share] for view in views] for rank in self._members]

        def steps() -> Iterator[Work]:
            own = out.new_empty(share * len(parts))
            for part, target in zip(parts, torch.split(own, share) if share else ()):
                self._reduce_inside(part, op, target)
            yield from direct.reduce_scatter.steps(self._across, self._inside.reducer, out, own, op)

        return steps

    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> LocalPart:
        """Gather the shares of the ranks that ``across`` connects, and copy them to all local ranks' outputs."""
        local_rank, share = self._inside.rank, tensor.numel()
        targets = [[out[rank * share : (rank + 1) * share] for out in outs] for rank in self._members]
        spread = self._inside.copying([(target[local_rank], target) for target in targets])

        def steps() -> Iterator[Work]:
            own = targets[self._across.rank][local_rank]
            if own.data_ptr() != tensor.data_ptr():
                own.copy_(tensor)
            for distance in range(1, self._across.size):
                to = (self._across.rank + distance) % self._across.size
                source = (self._across.rank - distance) % self._across.size
                yield from exchange(self._across, own, to, targets[source][local_rank], source)
            spread()

        return steps

    def broadcast(self, views: Sequence[Tensor], root: int) -> LocalPart:
        """Send this rank's slice of the root's buffer across nodes, and copy it to all local ranks."""
        node = next(number for number, ranks in enumerate(self._grid) if root in ranks)
        here = node == self._across.rank
        pieces = self._inside.slices(views)
        source = pieces[self._grid[node].index(root) if here else self._inside.rank]
        spread = self._inside.copying([(source, pieces)])

        def steps() -> Iterator[Work]:
            yield from tree.broadcast.steps(self._across, source, node)
            spread()

        return steps

    # Implementation ---------------------------------------------------------------------------------------------------

    def _pipelined(self, rows: Sequence[Sequence[Tensor]], op: str) -> Iterator[Work]:
        sent: _PieceExchange | None = None
        returning: _PieceExchange | None = None
        for row in (*rows, None, None):
            started: _PieceExchange | None = None
            if row is not None:
                self._reduce_inside(row, op, row[self._inside.rank])
                started = _PieceExchange(self._across, self._inside.reducer, row, row[self._inside.rank], op)
            if sent is not None:
                yield from sent.reduced()
            if returning is not None:
                yield from returning.arrived()
                self._spread(returning.row)
            sent, returning = started, sent

    def _by_halving(self, rows: Sequence[Sequence[Tensor]], op: str) -> Iterator[Work]:
        for row in rows:
            own = row[self._inside.rank]
            self._reduce_inside(row, op, own)
            yield from recursive.all_reduce.steps(self._across, self._inside.reducer, own, op)
            self._spread(row)

    def _spread(self, row: Sequence[Tensor]) -> None:
        """Copy this rank's piece to the local ranks."""
        own = row[self._inside.rank]
        for block in zip(*(torch.split(piece, BLOCK) for piece in row)):
            for copy in block:
                copy.copy_(block[self._inside.rank])
        self._inside.count((len(row) - 1) * own.nbytes)

    def _reduce_inside(self, pieces: Sequence[Tensor], op: str, target: Tensor) -> None:
        """Reduce pieces of the local ranks' buffers into one tensor, which may be one of them."""
        self._inside.reducer.reduce_into(target, pieces, op, average_scale(op, self._inside.size))


class _PieceExchange:
    """Piece in transit: to the nodes, each of which reduces a slice of it, and back."""

    def __init__(self, across: Transport, reducer: Reducer, row: Sequence[Tensor], own: Tensor, op: str) -> None:
        self.row = row
        self._across = across
        self._reducer = reducer
        self._op = op
        self._slices = torch.split(own, slices(own.numel(), across.size))
        own = self._slices[across.rank]
        self._received = [own if rank == across.rank else torch.empty_like(own) for rank in range(across.size)]
        self._works = self._exchange(self._received, self._slices)

    def reduced(self) -> Iterator[Work]:
        """Wait for the slices of the other nodes, reduce them, and start to send the result."""
        yield from self._works
        own = self._slices[self._across.rank]
        self._reducer.reduce_into(own, self._received, self._op, average_scale(self._op, self._across.size))
        self._works = self._exchange(self._slices, [own] * self._across.size)

    def arrived(self) -> Iterator[Work]:
        """Wait for the results of the other nodes."""
        yield from self._works

    def _exchange(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> list[Work]:
        others = [rank for rank in range(self._across.size) if rank != self._across.rank]
        arriving = [self._across.irecv(incoming[rank], rank, TAG) for rank in others]
        return [*(self._across.isend(outgoing[rank], rank, TAG) for rank in others), *arriving]


class NodeCollectives:
    """Collectives in the memory of this rank's node. Construction is collective over ``transport``.

    ``prepare`` returns a call that is created once and reused: creating its views costs more than
    the reduction of a small tensor.
    """

    def __init__(
        self,
        transport: Transport,
        node: MpiTransport,
        topology: Topology,
        reducer: Reducer,
        *,
        few_nodes: int = FEW_NODES,
        piece: int = PIECE,
    ) -> None:
        self.nodes = topology.nodes
        self._oversubscribed = topology.oversubscribed
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
            self._parts = HierarchicalParts(inside, self._across, topology.grid, few_nodes, piece)
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
        if self.memory.find(whole) is not None:
            if operation == "all_gather" and self._in_place(*arguments):
                return partial(self._queue.synchronize, operation)
            return partial(self._queue.run, operation, self._part(operation, whole, arguments))
        if self.nodes > 1:
            assert operation == "all_reduce", "over several nodes, the caller stages reductions only"
            return self._all_reduce_in_chunks(*arguments)
        if self._staged is None:
            self._staged = StagedCollectives(self._queue, self._reducer, oversubscribed=self._oversubscribed)
        call: PreparedCall = getattr(self._staged, operation)(*arguments)
        return call

    def prepare_start(self, operation: str, whole: Tensor, arguments: Sequence[Any]) -> Callable[..., Work]:
        """Return a prepared call that starts a reduction of a tensor of ``empty``.

        The arguments of that call are tensors to keep until the reduction has completed.
        """
        return partial(self._queue.start, operation, self._part(operation, whole, arguments))

    # Implementation ---------------------------------------------------------------------------------------------------

    def _all_reduce_in_chunks(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces a private tensor over several nodes."""
        if self._chunk is None:
            self._chunk = self.empty(CHUNK, torch.uint8)
        buffer = self._chunk.view(tensor.dtype)
        pieces = torch.split(tensor, buffer.numel())
        chunks = {piece.numel(): buffer[: piece.numel()] for piece in (pieces[0], pieces[-1])}
        calls = {numel: self.prepare("all_reduce", chunk, (chunk, op)) for numel, chunk in chunks.items()}

        def reduce_in_chunks() -> None:
            for piece in pieces:
                chunk = chunks[piece.numel()]
                chunk.copy_(piece)
                calls[piece.numel()]()
                piece.copy_(chunk)

        return reduce_in_chunks

    def _part(self, operation: str, whole: Tensor, arguments: Sequence[Any]) -> LocalPart:
        """Return this rank's part: ``whole`` is replaced by its views in the memory of every local rank."""
        found = self.memory.find(whole)
        assert found is not None, "the caller has checked that the tensor is in node memory"
        views = found[0].views(found[1], whole.numel(), whole.dtype)
        parts = self._inside if operation == "reduce" else self._parts
        part: LocalPart = getattr(parts, operation)(*(views if each is whole else each for each in arguments))
        return part

    def _in_place(self, out: Tensor, tensor: Tensor) -> bool:
        """Return whether the shares of all ranks are in their places in a tensor of ``common``: no copy is needed."""
        in_own_place = tensor.data_ptr() - out.data_ptr() == self.memory.rank * tensor.nbytes
        return self._across is None and in_own_place and self.is_common(out)
