"""Give ranks one object to talk through: it owns a transport, node memory, and the choice of algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.collectives import direct
from hpctrain.collectives.reduction import Reducer, average_scale, carrier_op, check_op
from hpctrain.collectives.select import select
from hpctrain.collectives.topology import discover
from hpctrain.errors import CommunicationError
from hpctrain.transport.base import Finished, Transport, Work
from hpctrain.transport.connect import connect
from hpctrain.transport.recorder import Recorder

if TYPE_CHECKING:
    from hpctrain.collectives.window import WindowReductions
    from hpctrain.transport.window import NodeBuffer, NodeMemory


class Communicator:
    """Let ``size`` ranks exchange tensors; this is number ``rank``.

    Every collective is called by all ranks in the same order, with tensors of the same size and dtype. Host tensors of
    ``empty`` lie in memory that the ranks of a node share, which makes their reductions several times faster; all ranks
    then name the same piece of the same tensor. A tensor on a GPU is staged through host memory.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._node = transport.split_node()
        place = discover(transport, self._node)
        self.node, self.nodes, self.uniform = place.node, place.nodes, place.uniform
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._reducer = Reducer()
        self._memory: NodeMemory | None = None
        self._window: WindowReductions | None = None
        self._across: Transport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # a copy of a model talks to the same ranks

    @classmethod
    def world(cls, comm: Any = None) -> Communicator:
        """Return the communicator of all ranks, or of any mpi4py communicator."""
        return cls(connect(comm)[0])

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Tell whether tensors of ``empty`` are shared, so that their reductions can stay under way (``async_op``)."""
        # Nodes with unequal numbers of ranks would cut a tensor into unequal slices, which cannot meet across nodes.
        return self.local_size > 1 and (self.nodes == 1 or self.uniform)

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor, in node-shared memory where there is a node to share with; a call by all ranks.

        The memory lives as long as the communicator.
        """
        if not self.shares_memory:
            return torch.empty(numel, dtype=dtype)
        buffer, offset = self._node_memory().allocate(max(numel, 1) * dtype.itemsize)
        return buffer.views(offset, numel, dtype)[self.local_rank]

    # Collectives ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank has come."""
        self.transport.barrier()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy the root's tensor to every rank, in place; return it."""
        with _hosted(tensor) as host:
            self.transport.broadcast(host, root)
        return tensor

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        """Reduce elementwise over all ranks, in place; return the tensor, or its ``Work`` if ``async_op``.

        ``op`` is sum, average, min, max or product; 16-bit floats are accumulated in float32 (and rounded once more
        between nodes). All ranks get identical bits. With ``async_op`` a window reduction goes on whenever ``done`` or
        ``wait`` of any of them is called; other algorithms have ended on return. Raises ``CommunicationError`` for an
        operation or algorithm that cannot serve.
        """
        check_op(op, tensor.dtype)
        found = self._find(tensor)
        carries = self.transport.reduces(tensor.dtype, carrier_op(op))
        nothing = self.size == 1 or not tensor.numel()
        chosen = select(algorithm, in_window=nothing or found is not None, carrier_reduces=carries)
        if nothing:
            return Finished() if async_op else tensor
        if chosen == "window" and found is not None and self._window is not None:
            work = self._window.start(found[0], found[1], tensor.numel(), tensor.dtype, op)
            if async_op:
                return work
            work.wait()
            return tensor
        with _hosted(tensor) as host:
            self._reduce_host(host.view(-1), op, chosen)
        return Finished() if async_op else tensor

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over all ranks and keep slice ``rank`` of the flat result in ``out``; return it.

        ``tensor`` has ``size`` times the elements of ``out``.
        """
        check_op(op, tensor.dtype)
        self._check_shares(out, tensor)
        with _hosted(tensor, back=False) as host, _hosted(out) as part:
            direct.reduce_scatter(self.transport, self._reducer, part.view(-1), host.view(-1), op)
        return out

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Put the tensors of all ranks behind each other in ``out``, in rank order; return it.

        ``out`` has ``size`` times the elements of ``tensor``.
        """
        self._check_shares(tensor, out)
        with _hosted(tensor, back=False) as host, _hosted(out) as whole:
            self.transport.all_gather(whole, host)
        return out

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send a tensor to one rank; return when its memory may be written again."""
        with _hosted(tensor, back=False) as host:
            self.transport.send(host, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive from one rank into a tensor of the size that was sent; return it."""
        with _hosted(tensor) as host:
            self.transport.recv(host, peer, tag)
        return tensor

    # Small objects ----------------------------------------------------------------------------------------------------

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        return self.transport.all_gather_object(item)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return self.transport.broadcast_object(item, root)

    # Life -------------------------------------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return a communicator among the ranks of the same color, ordered by key (by rank where none is given)."""
        return Communicator(self.transport.split(color, self.rank if key is None else key))

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Count calls and bytes of this rank, messages and node memory, for the length of a ``with`` block."""
        try:
            with self.transport.recording() as recorder:
                self._share_recorder()
                yield recorder
        finally:
            self._share_recorder()

    def free(self) -> None:
        """Give back memory and transports; a call by all ranks, after which its tensors must not be touched."""
        if self._across is not None:
            self._across.free()
        if self._memory is not None:
            self._memory.free()
        self._memory = self._window = self._across = None
        self._node.free()
        self.transport.free()

    # How --------------------------------------------------------------------------------------------------------------

    def _share_recorder(self) -> None:
        for part in (self._memory, self._across):
            if part is not None:
                part.recorder = self.transport.recorder

    def _node_memory(self) -> NodeMemory:
        if self._memory is None:
            from hpctrain.collectives.window import WindowReductions
            from hpctrain.transport.mpi import MpiTransport
            from hpctrain.transport.window import NodeMemory

            assert isinstance(self._node, MpiTransport), "only MPI has nodes of several ranks"
            self._memory = NodeMemory(self._node.split_node())
            if self.nodes > 1:
                self._across = self.transport.split(self.local_rank, self.rank)
            self._window = WindowReductions(self._memory, self._reduce_across if self._across else None)
            self._share_recorder()
        return self._memory

    def _reduce_across(self, tensor: Tensor, op: str) -> Work:
        assert self._across is not None
        return direct.start_all_reduce(self._across, self._reducer, tensor, op)

    def _find(self, tensor: Tensor) -> tuple[NodeBuffer, int] | None:
        if self._memory is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        return self._memory.find(tensor)

    def _reduce_host(self, flat: Tensor, op: str, algorithm: str) -> None:
        if algorithm == "direct":
            direct.all_reduce(self.transport, self._reducer, flat, op)
            return
        self.transport.all_reduce(flat, carrier_op(op))
        scale = average_scale(op, self.size)
        if scale is not None:
            flat.mul_(scale)

    def _check_shares(self, share: Tensor, whole: Tensor) -> None:
        if share.dtype != whole.dtype or share.numel() * self.size != whole.numel():
            raise CommunicationError(
                f"{whole.numel()} elements of {whole.dtype} are not {self.size} shares "
                f"of {share.numel()} elements of {share.dtype}"
            )


@contextmanager
def _hosted(tensor: Tensor, *, back: bool = True) -> Iterator[Tensor]:
    """Yield a contiguous host tensor with the same content; afterwards copy it ``back`` where it is a copy."""
    host = tensor.detach()
    if host.device.type == "cpu" and host.is_contiguous():
        yield host
        return
    host = host.contiguous().cpu()
    yield host
    if back:
        tensor.detach().copy_(host)
