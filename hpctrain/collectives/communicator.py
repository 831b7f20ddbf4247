"""Communicators: ranks that exchange tensors, by a transport, node memory, and a choice of algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.collectives.announcer import Announcer
from hpctrain.collectives.arguments import Arguments, check_contiguous
from hpctrain.collectives.bucket import Bucket
from hpctrain.collectives.carriers import Carriers
from hpctrain.collectives.choice.table import Layout, Table
from hpctrain.collectives.host import HostCollectives, pair_key
from hpctrain.collectives.mesh import AXES, Mesh, fill_in
from hpctrain.collectives.node.slots import Handover, Slots, make_slots
from hpctrain.collectives.reduction import check_op
from hpctrain.collectives.rows import gather_into, gather_rows
from hpctrain.collectives.topology import discover
from hpctrain.transport.base import Transport, Work
from hpctrain.transport.connect import connect
from hpctrain.transport.recorder import Recorder

if TYPE_CHECKING:
    from hpctrain.transport.canary import Verdict


class Communicator:
    """Group of ``size`` ranks that exchange tensors; this one is number ``rank``.

    Every collective is called by all ranks in the same order, with tensors of the same size and dtype. Host tensors of
    ``empty`` are in memory that the ranks of a node share, which makes their reductions several times faster; all ranks
    then pass the same part of the same tensor. A tensor on a GPU is staged through host memory, unless ``use_device``
    has found a better way. With ``HPCTRAIN_CHECK=order`` the ranks compare each collective before they begin it.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._node = transport.split_node()
        place = discover(transport, self._node)
        self.node, self.nodes, self.uniform = place.node, place.nodes, place.uniform
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.crowded = place.crowded  # more ranks than cores on a node
        self._layout = Layout(transport.size, place.nodes, place.local_size)
        self._host = HostCollectives(transport, self._node, place)
        self._announce = Announcer(transport, self._host.memory)
        # Ways that were carried out before on the same memory: all that is checked was checked then. Where the ranks
        # compare each operation, or the host takes turns with a GPU, none is taken unseen.
        self._kept = {} if self._announce.compares else self._host.kept
        self._carriers = Carriers(transport, self._host)
        self._arguments = Arguments(transport.rank, transport.size)
        self._tables: Mapping[Layout, Table] = {}
        self._parts: list[Communicator] = []
        self._twin: Communicator | None = None
        self._freed = False

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
        return self._host.memory.exists

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor, in node-shared memory where there is a node to share with. Collective.

        Each rank has its own; the memory lives as long as the communicator.
        """
        self._announce("empty", detail=f"{numel} {dtype}")
        return self._host.empty(numel, dtype)

    def has_space(self, nbytes: int) -> bool:
        """Return whether every node has this much memory left that its ranks can share; warn if not. Collective."""
        self._announce("has_space", detail=str(nbytes))
        return self._host.memory.has_space(nbytes)

    def common(self, numel: int, dtype: torch.dtype = torch.float32, *, must_share: bool = False) -> Tensor:
        """Return a flat tensor that is one and the same for all ranks of the node. Collective.

        What one rank writes, the others read, after the next collective. Gathering shares that lie in their places
        there copies nothing: ``comm.all_gather(whole, whole.chunk(comm.size)[comm.rank])``. Where nothing is shared,
        or /dev/shm has no space left, each rank has its own; with ``must_share`` the latter raises
        ``CommunicationError`` on all ranks. The memory lives as long as the communicator.
        """
        self._announce("common", detail=f"{numel} {dtype}")
        return self._host.empty(numel, dtype, common=True, must_share=must_share)

    def slots(self, wanted: Sequence[Handover]) -> list[Slots | None]:
        """Return rings of node memory through which one rank hands tensors to another. Collective.

        One for each that is wanted, and None where this rank has no part in it or the two share no memory. The memory
        lives as long as the communicator.
        """
        self._announce("slots", detail=str(wanted))
        return make_slots(self._host.memory, self.rank, wanted)

    # Collectives ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self._announce("barrier")
        with self._carriers.hosted.turn("barrier"):
            self.transport.barrier()

    def broadcast(self, tensor: Tensor, root: int = 0, *, algorithm: str = "auto") -> Tensor:
        """Copy the root's tensor to every rank, in place; return it.

        Algorithms: mpi, tree, ring, double_tree, window, hierarchical.
        """
        way = self._kept.get(("broadcast", tensor.data_ptr(), tensor.numel(), tensor.dtype, root, algorithm))
        if way is not None and tensor.is_contiguous():
            way()
            return tensor
        self._arguments.check_root(root)
        self._announce("broadcast", tensor, detail=f"root {root}", where=tensor)
        self._carriers.of(tensor).broadcast(tensor, root, algorithm)
        return tensor

    def reduce(self, tensor: Tensor, op: str = "sum", root: int = 0, *, algorithm: str = "auto") -> Tensor:
        """Reduce elementwise into the root's tensor; the others keep theirs; return it.

        ``op`` is as for ``all_reduce``. Algorithms: mpi, tree, double_tree, window (tensors of ``empty``).
        """
        check_op(op, tensor.dtype)
        self._arguments.check_root(root)
        self._announce("reduce", tensor, detail=f"{op}, root {root}", where=tensor)
        self._carriers.of(tensor).reduce(tensor, op, root, algorithm)
        return tensor

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        """Reduce elementwise over all ranks, in place; return the tensor, or its ``Work`` if ``async_op``.

        ``op`` is sum, average, min, max, product, or for integers and bool band, bor, bxor; 16-bit floats are
        accumulated in float32 (and rounded once more between nodes). All ranks get identical bits. Algorithms: window
        and hierarchical (on one node, and on several), mpi, direct, tree, ring, recursive, double_tree. With
        ``async_op`` the reduction of a tensor of ``empty`` goes on whenever ``done`` or ``wait`` of any of them is
        called; others have ended on return. Raises ``CommunicationError`` for an operation or algorithm that cannot
        serve.
        """
        operation = "start_all_reduce" if async_op else "all_reduce"
        way = self._kept.get((operation, tensor.data_ptr(), tensor.numel(), tensor.dtype, op, algorithm))
        if way is not None and tensor.is_contiguous():
            work: Work = way()
            return work if async_op else tensor
        check_op(op, tensor.dtype)
        self._announce("all_reduce", tensor, detail=op, where=tensor)
        if async_op:
            return self._carriers.of(tensor).start_all_reduce(tensor, op, algorithm)
        self._carriers.of(tensor).all_reduce(tensor, op, algorithm)
        return tensor

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        """Reduce over all ranks and keep slice ``rank`` of the flat result in ``out``; return it, or its ``Work``.

        ``tensor`` has ``size`` times the elements of ``out``, which may be its slice ``rank``. ``async_op`` is as for
        ``all_reduce``: neither tensor may be touched before the end. Algorithms: mpi, direct, ring, recursive, window,
        hierarchical.
        """
        operation = "start_reduce_scatter" if async_op else "reduce_scatter"
        way = self._kept.get(pair_key(operation, out, tensor, op, algorithm))
        if way is not None and out.is_contiguous() and tensor.is_contiguous():
            work: Work = way(out) if async_op else way()
            return work if async_op else out
        check_op(op, tensor.dtype)
        self._arguments.check_shares(out, tensor)
        self._announce("reduce_scatter", tensor, detail=op, where=tensor)
        if async_op:
            return self._carriers.of(tensor).start_reduce_scatter(out, tensor, op, algorithm)
        self._carriers.of(tensor).reduce_scatter(out, tensor, op, algorithm)
        return out

    def all_gather(
        self, out: Tensor, tensor: Tensor | None = None, *, weight: float = 1.0, algorithm: str = "auto"
    ) -> Tensor:
        """Concatenate the tensors of all ranks in ``out``, in rank order; return it.

        ``out`` has ``size`` times the elements of ``tensor``, which may be its slice ``rank``. With one tensor only,
        ``all_gather(tensor)`` returns a new one that holds the rows of all ranks, whose numbers may differ. Algorithms:
        mpi, ring, recursive, window, hierarchical.

        If the tensor requires a gradient, what is returned carries it: the backward pass, a call by all ranks, adds up
        the gradients of all ranks for this rank's tensor. ``weight``, for one tensor only, is what a strategy
        will multiply this rank's gradients with (``Strategy.sample_weight``): the sum is over the weighted losses then,
        and a rank of weight 0 gives no rows.
        """
        if tensor is None:
            return gather_rows(self, out, weight, algorithm)
        if tensor.requires_grad and torch.is_grad_enabled():
            return gather_into(self, out, tensor, algorithm)
        way = self._kept.get(pair_key("all_gather", out, tensor, algorithm))
        if way is not None and out.is_contiguous() and tensor.is_contiguous():
            way()
            return out
        self._arguments.check_shares(tensor, out)
        self._announce("all_gather", tensor, where=out)
        self._carriers.of(tensor).all_gather(out, tensor, algorithm)
        return out

    def gather(self, out: Tensor | None, tensor: Tensor, root: int = 0) -> Tensor | None:
        """Concatenate the tensors of all ranks in the root's ``out``, in rank order; return it.

        On the root ``out`` has ``size`` times the elements of ``tensor``; the other ranks give None.
        """
        whole = self._arguments.only_on(root, out, "out", tensor)
        self._announce("gather", tensor, detail=f"root {root}")
        self._carriers.of(tensor).gather(whole, tensor, root)
        return whole

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0) -> Tensor:
        """Give each rank its share of the root's tensor in ``out``; return it.

        On the root ``tensor`` has ``size`` times the elements of ``out``; the other ranks give None.
        """
        whole = self._arguments.only_on(root, tensor, "tensor", out)
        self._announce("scatter", out, detail=f"root {root}")
        self._carriers.of(out).scatter(out, whole, root)
        return out

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Send share r of a tensor to rank r and keep in ``out`` the shares that come, in rank order; return it.

        Both have the same number of elements, a multiple of ``size``.
        """
        self._arguments.check_exchanged(out, tensor)
        self._announce("all_to_all", tensor)
        self._carriers.of(tensor).all_to_all(out, tensor)
        return out

    def bucket(self) -> Bucket:
        """Return a ``with`` block that carries several small tensors in one message per operation and dtype."""
        return Bucket(self)

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send a tensor to one rank; return when its memory may be written again."""
        self._arguments.check_tag(tag)
        self._carriers.of(tensor).send(tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive from one rank into a tensor of the size that was sent; return it."""
        self._arguments.check_tag(tag)
        self._carriers.of(tensor).recv(tensor, peer, tag)
        return tensor

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to send a tensor to one rank; it must not change before ``wait``."""
        self._arguments.check_tag(tag)
        return self._carriers.of(tensor).isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to receive from one rank into a contiguous tensor; the content is there after ``wait``."""
        self._arguments.check_tag(tag)
        check_contiguous(tensor)
        return self._carriers.of(tensor).irecv(tensor, peer, tag)

    # Small objects ----------------------------------------------------------------------------------------------------

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        self._announce("all_gather_object")
        with self._carriers.hosted.turn("all_gather_object"):
            return self.transport.all_gather_object(item)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object."""
        self._announce("broadcast_object", detail=f"root {root}")
        with self._carriers.hosted.turn("broadcast_object"):
            return self.transport.broadcast_object(item, root)

    # Choice -----------------------------------------------------------------------------------------------------------

    def use_tables(self, tables: Mapping[Layout, Table]) -> None:
        """Let ``auto`` choose as was measured for this layout of ranks; a call by all ranks with the same tables.

        Communicators that are split from this one have other layouts, and choose by their tables.
        """
        self._tables = tables
        self._host.use_tables(tables)

    def use_device(
        self, device: torch.device, verdict: Verdict | None = None, parent: Communicator | None = None
    ) -> None:
        """Let tensors on a GPU travel by NCCL, by MPI with device pointers, or staged. Collective.

        ``device`` is this rank's. ``verdict`` is what the canary found out about MPI and device pointers; one about
        another MPI does not count. A ``parent``, of which this is a part, shares its order of operations.
        """
        self._kept = {}
        above = None if parent is None else parent._carriers
        self._carriers.use_device(device, verdict, above, self._tables.get(self._layout))

    # Life -------------------------------------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return a communicator among the ranks of the same color, ordered by key (by rank where none is given).

        It ends with this one, unless it is freed before.
        """
        part = Communicator(self.transport.split(color, self.rank if key is None else key))
        self._parts = [*(each for each in self._parts if not each._freed), part]
        part.use_tables(self._tables)
        if self._carriers.place is not None and part.size > 1:
            part.use_device(*self._carriers.place, parent=self)
        return part

    def twin(self) -> Communicator:
        """Return a communicator of the same ranks whose operations never meet those of this one; made once.

        The first call is one by all ranks.
        """
        if self.size == 1:
            return self
        if self._twin is None or self._twin._freed:
            self._twin = self.split(0)
        return self._twin

    def mesh(self, pipe: int = 1, data: int = -1, tensor: int = 1, order: Sequence[str] = AXES) -> Mesh:
        """Return this rank's communicators along the axes of a mesh. Collective.

        One length may be -1: the number of ranks divided by the others. Along the last axis of ``order`` the ranks are
        neighbours. Raises ``UsageError``, which names what is possible, if the lengths do not fit the number of ranks.
        """
        return Mesh(self, fill_in(self.size, pipe, data, tensor, order))

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Count the calls and bytes of this rank in a ``with`` block, of messages and of node memory."""
        try:
            with self.transport.recording() as recorder:
                self._host.memory.share_recorder(recorder)
                yield recorder
        finally:
            self._host.memory.share_recorder(self.transport.recorder)

    def free(self) -> None:
        """Free memory and transports, those of its parts too; a second call has no effect. Collective.

        Tensors of its memory must not be used afterwards. MPI libraries have few communicators: 2048 with MPICH.
        """
        if self._freed:
            return
        self._freed = True
        for part in reversed(self._parts):
            part.free()
        self._parts.clear()
        self._carriers.free()
        self._host.free()
        self._announce.free()
        self._node.free()
        self.transport.free()
