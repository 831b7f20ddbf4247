"""Communicators: groups of ranks that exchange tensors over a transport and node-shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.composite import CoalescingBucket, gather_into, gather_rows
from hpctrain.comm.debug import mismatch_detector
from hpctrain.comm.dispatch import ArgumentChecks, Dispatch, check_contiguous
from hpctrain.comm.mesh import AXES, Mesh, fill_in
from hpctrain.comm.prepared import FlatHostCollectives, PreparedCallCache, call_key, message_key
from hpctrain.comm.reduction import check_op
from hpctrain.comm.shm.memory import discover
from hpctrain.comm.shm.spsc_ring import RingHandle, SpscRing, make_slots
from hpctrain.comm.transport.base import Recorder, Transport, Work
from hpctrain.comm.transport.connect import connect
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout, default_table

if TYPE_CHECKING:
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult

C = TypeVar("C", bound="Communicator")


class Communicator:
    """Group of ``size`` ranks that exchange tensors; this rank is number ``rank``.

    All ranks call every collective in the same order, with tensors of the same size and dtype. Host
    tensors from ``empty`` are stored in node-shared memory, which makes their reductions several
    times faster. For such a tensor, all ranks must pass the same part of the same tensor. A tensor
    on a GPU is staged through host memory unless ``use_device`` has found a faster path. With
    ``HPCTRAIN_CHECK=order`` the ranks compare each collective before it starts.
    """

    failed = False  # whether another rank has died, see TolerantCommunicator
    _twin: Communicator | None = None
    _origin: tuple[int, ...] = (0, 0)  # color and key by which it was split from another one
    _freed = False
    _dispatch_type = Dispatch  # chooses the collectives that serve a tensor

    def __init__(self, transport: Transport) -> None:
        self._tables: Mapping[RankLayout, AlgorithmTable] = {}
        self._parts: list[Communicator] = []
        self._former: list[object] = []  # what served it before ``_replace``
        self._connect(transport)

    def _connect(self, transport: Transport) -> None:
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self._node = transport.split_node()
        topology = discover(transport, self._node)
        self.node, self.nodes, self.uniform = topology.node, topology.nodes, topology.uniform
        self.local_rank, self.local_size = topology.local_rank, topology.local_size
        self.oversubscribed = topology.oversubscribed  # a node has more ranks than cores
        self._layout = RankLayout(transport.size, topology.nodes, topology.local_size)
        default = default_table(self._layout, topology.oversubscribed)
        self._host = FlatHostCollectives(transport, self._node, topology, default)
        self._detector = mismatch_detector(transport)
        # A repeated call on the same memory needs no second check of its arguments. The cache stays empty
        # if the ranks compare each operation, or if host operations must be ordered with those of a GPU.
        self._cache = self._host.cache if self._detector is None else PreparedCallCache()
        self._dispatch = self._dispatch_type(self._host)
        self._arguments = ArgumentChecks(transport.rank, transport.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # a copied model communicates with the same ranks

    @classmethod
    def world(cls, comm: Any = None) -> Communicator:
        """Return the communicator of all ranks, or of the ranks of an mpi4py communicator."""
        return cls(connect(comm)[0])

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Return whether tensors of ``empty`` are in shared memory, so that ``async_op`` reductions overlap."""
        return self._host.memory.exists

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor, in node-shared memory if ranks share the node, valid as long as this. Collective."""
        self._compare("empty", detail=f"{numel} {dtype}")
        return self._host.empty(numel, dtype)

    def has_space(self, nbytes: int) -> bool:
        """Return whether every node has this many bytes of shared memory left; warn if not. Collective."""
        self._compare("has_space", detail=str(nbytes))
        return self._host.memory.has_space(nbytes)

    def common(self, numel: int, dtype: torch.dtype = torch.float32, *, must_share: bool = False) -> Tensor:
        """Return a flat tensor that all ranks of the node share. Collective.

        Data that one rank writes are visible to the others after the next collective. Gathering
        shares that are already in their places copies nothing:
        ``comm.all_gather(whole, whole.chunk(comm.size)[comm.rank])``. If no memory is shared, or
        /dev/shm has no space left, each rank gets its own tensor. With ``must_share``, a full
        /dev/shm raises ``CommunicationError`` on all ranks instead. The memory remains valid as
        long as the communicator.
        """
        self._compare("common", detail=f"{numel} {dtype}")
        return self._host.empty(numel, dtype, common=True, must_share=must_share)

    def slots(self, wanted: Sequence[RingHandle]) -> list[SpscRing | None]:
        """Return ring buffers in node memory, each passing tensors from one rank to another. Collective.

        An entry is None if this rank is neither end of the requested ring, or if the two ranks share
        no memory. The memory remains valid as long as the communicator.
        """
        self._compare("slots", detail=str(wanted))
        return make_slots(self._host.memory, self.rank, wanted)

    # Collectives ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called it. Collective."""
        self._compare("barrier")
        with self._dispatch.host.ordered():
            self.transport.barrier()

    def broadcast(self, tensor: Tensor, root: int = 0, *, algorithm: str = "auto") -> Tensor:
        """Copy the root's tensor to every rank, in place; return it. Collective.

        Algorithms: mpi, tree, ring, double_tree, window, hierarchical.
        """
        call = self._cache.get(call_key("broadcast", tensor, None, "", root, algorithm))
        if call is not None and tensor.is_contiguous():
            call()
            return tensor
        self._arguments.check_root(root)
        self._compare("broadcast", tensor, detail=f"root {root}", where=tensor)
        self._dispatch.of(tensor).run("broadcast", tensor, root=root, algorithm=algorithm)
        return tensor

    def reduce(self, tensor: Tensor, op: str = "sum", root: int = 0, *, algorithm: str = "auto") -> Tensor:
        """Reduce elementwise into the root's tensor; other ranks' tensors are unchanged; return it. Collective.

        ``op`` is as for ``all_reduce``. Algorithms: mpi, tree, double_tree, window (tensors of
        ``empty``).
        """
        check_op(op, tensor.dtype)
        self._arguments.check_root(root)
        self._compare("reduce", tensor, detail=f"{op}, root {root}", where=tensor)
        self._dispatch.of(tensor).run("reduce", tensor, op=op, root=root, algorithm=algorithm)
        return tensor

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        """Reduce elementwise over all ranks, in place; return the tensor, or its ``Work`` if ``async_op``. Collective.

        ``op`` is sum, average, min, max or product, or for integers and bool also band, bor or
        bxor. 16-bit floats are accumulated in float32 (and rounded once more between nodes). All
        ranks get identical bits. Algorithms: window (one node), hierarchical (several nodes), mpi,
        direct, tree, ring, recursive, double_tree. With ``async_op`` the reduction of a tensor of
        ``empty`` progresses whenever ``done`` or ``wait`` of any pending reduction is called.
        Reductions of other tensors have completed on return. Raises ``CommunicationError`` for an
        operation or algorithm that is unknown or not applicable.
        """
        operation = "start_all_reduce" if async_op else "all_reduce"
        call = self._cache.get(call_key(operation, tensor, None, op, None, algorithm))
        if call is not None and tensor.is_contiguous():
            work: Work = call()
            return work if async_op else tensor
        check_op(op, tensor.dtype)
        self._compare("all_reduce", tensor, detail=op, where=tensor)
        work = self._dispatch.of(tensor).run("all_reduce", tensor, op=op, algorithm=algorithm, async_op=async_op)
        return work if async_op else tensor

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        """Reduce over all ranks; store slice ``rank`` of the flat result in ``out``; return it, or its ``Work``.

        Collective. ``tensor`` has ``size`` times the elements of ``out``. ``out`` may be slice
        ``rank`` of ``tensor``. ``async_op`` is as for ``all_reduce``: do not access either tensor
        before completion. Algorithms: mpi, direct, ring, recursive, window, hierarchical.
        """
        operation = "start_reduce_scatter" if async_op else "reduce_scatter"
        call = self._cache.get(call_key(operation, tensor, out, op, None, algorithm))
        if call is not None and out.is_contiguous() and tensor.is_contiguous():
            work: Work = call(out) if async_op else call()
            return work if async_op else out
        check_op(op, tensor.dtype)
        self._arguments.check_shares(out, tensor)
        self._compare("reduce_scatter", tensor, detail=op, where=tensor)
        collectives = self._dispatch.of(tensor)
        work = collectives.run("reduce_scatter", tensor, out, op=op, algorithm=algorithm, async_op=async_op)
        return work if async_op else out

    def all_gather(
        self, out: Tensor, tensor: Tensor | None = None, *, weight: float = 1.0, algorithm: str = "auto"
    ) -> Tensor:
        """Concatenate the tensors of all ranks in ``out``, in rank order; return it. Collective.

        ``out`` has ``size`` times the elements of ``tensor``, which may be its slice ``rank``. With
        a single tensor, ``all_gather(tensor)`` returns a new tensor with the rows of all ranks. The
        number of rows may differ between ranks. Algorithms: mpi, ring, recursive, window,
        hierarchical.

        If the tensor requires a gradient, the result is differentiable. The backward pass is
        collective: it sums the gradients of all ranks with respect to this rank's tensor.
        ``weight``, for a single tensor only, is the factor that a strategy will apply to this
        rank's gradients (``Strategy.sample_weight``). The sum is then over the weighted losses, and
        a rank of weight 0 contributes no rows.
        """
        if tensor is None:
            return gather_rows(self, out, weight, algorithm)
        if tensor.requires_grad and torch.is_grad_enabled():
            return gather_into(self, out, tensor, algorithm)
        call = self._cache.get(call_key("all_gather", tensor, out, "", None, algorithm))
        if call is not None and out.is_contiguous() and tensor.is_contiguous():
            call()
            return out
        self._arguments.check_shares(tensor, out)
        self._compare("all_gather", tensor, where=out)
        self._dispatch.of(tensor).run("all_gather", tensor, out, algorithm=algorithm)
        return out

    def gather(self, out: Tensor | None, tensor: Tensor, root: int = 0) -> Tensor | None:
        """Concatenate the tensors of all ranks in the root's ``out``, in rank order; return it. Collective.

        On the root ``out`` has ``size`` times the elements of ``tensor``; the other ranks pass
        None.
        """
        whole = self._arguments.only_on(root, out, "out", tensor)
        self._compare("gather", tensor, detail=f"root {root}")
        self._dispatch.of(tensor).exchange("gather", whole, tensor, root)
        return whole

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0) -> Tensor:
        """Copy each rank's share of the root's tensor to ``out``; return it. Collective.

        On the root ``tensor`` has ``size`` times the elements of ``out``; the other ranks pass
        None.
        """
        whole = self._arguments.only_on(root, tensor, "tensor", out)
        self._compare("scatter", out, detail=f"root {root}")
        self._dispatch.of(out).exchange("scatter", out, whole, root)
        return out

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Send share r of a tensor to rank r; store the received shares in ``out``, in rank order; return it.

        Collective. Both tensors have the same number of elements, a multiple of ``size``.
        """
        self._arguments.check_exchanged(out, tensor)
        self._compare("all_to_all", tensor)
        self._dispatch.of(tensor).exchange("all_to_all", out, tensor)
        return out

    def bucket(self) -> CoalescingBucket:
        """Return a context manager that coalesces small tensors into one message per operation and dtype."""
        return CoalescingBucket(self)

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send a tensor to one rank; return when its memory may be written again."""
        self._message("send", tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive a tensor from one rank into a tensor of the same size; return it."""
        self._message("recv", tensor, peer, tag)
        return tensor

    def _message(self, operation: str, tensor: Tensor, peer: int, tag: int) -> Any:
        call = self._cache.get(message_key(operation, tensor, peer, tag))
        if call is not None and tensor.is_contiguous():
            return call()
        self._arguments.check_tag(tag)
        return getattr(self._dispatch.of(tensor), operation)(tensor, peer, tag)

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to send a tensor to one rank; the tensor must not change before ``wait``."""
        self._arguments.check_tag(tag)
        return self._dispatch.of(tensor).isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to receive from one rank into a contiguous tensor; the content is valid after ``wait``."""
        self._arguments.check_tag(tag)
        check_contiguous(tensor)
        return self._dispatch.of(tensor).irecv(tensor, peer, tag)

    # Small objects ----------------------------------------------------------------------------------------------------

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective."""
        self._compare("all_gather_object")
        with self._dispatch.host.ordered():
            return self.transport.all_gather_object(item)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object. Collective."""
        self._compare("broadcast_object", detail=f"root {root}")
        with self._dispatch.host.ordered():
            return self.transport.broadcast_object(item, root)

    # Selection --------------------------------------------------------------------------------------------------------

    def use_tables(self, tables: Mapping[RankLayout, AlgorithmTable]) -> None:
        """Make ``auto`` choose by these measurements, the same on all ranks, also in later splits. Collective."""
        self._tables = tables
        self._host.use_tables(tables)

    def use_device(
        self, device: torch.device, verdict: ProbeResult | None = None, parent: Communicator | None = None
    ) -> None:
        """Make tensors on this rank's GPU travel by NCCL, by MPI with device pointers, or staged. Collective.

        ``verdict`` is the finding on MPI with device pointers; it is ignored if it was measured with
        another MPI library. With the ``parent`` of a split, both share one order of operations.
        """
        self._cache = PreparedCallCache()
        above = None if parent is None else parent._dispatch
        self._dispatch.use_device(device, verdict, above, self._tables.get(self._layout))

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return a communicator of the ranks with the same color, ordered by key (default: by rank). Collective.

        It is freed with this communicator at the latest.
        """
        return self._split(type(self), color, self.rank if key is None else key)

    def _split(self, kind: type[C], *origin: int) -> C:
        part = kind(self.transport.split(*origin))
        part._origin = origin
        self._parts = [*(each for each in self._parts if not each._freed), part]
        part.use_tables(self._tables)
        if self._dispatch.device_setup is not None and part.size > 1:
            part.use_device(*self._dispatch.device_setup, parent=self)
        return part

    def twin(self) -> Communicator:
        """Return a communicator of the same ranks with separate messages, created once. Collective at first."""
        if self.size == 1:
            return self
        if self._twin is None or self._twin._freed:
            self._twin = self.split(0)
        return self._twin

    def _replace(self, transport: Transport) -> None:
        """Continue with the ranks of another transport, as do all parts of this communicator. Collective over them."""
        self._former += [self.transport, self._node, self._host]
        self._connect(transport)
        self.use_tables(self._tables)
        self._parts = [part for part in self._parts if not part._freed]
        for part in self._parts:
            part._replace(transport.split(*part._origin))

    def mesh(self, pipe: int = 1, data: int = -1, tensor: int = 1, order: Sequence[str] = AXES) -> Mesh:
        """Return this rank's communicators along the axes of a mesh. Collective.

        One length may be -1: the number of ranks divided by the other lengths. Ranks along the last
        axis of ``order`` are neighbours. Raises ``UsageError``, which names possible lengths, if
        the lengths do not fit the number of ranks.
        """
        return Mesh(self, fill_in(self.size, pipe, data, tensor, order))

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Count this rank's calls and bytes in a ``with`` block, for messages and node memory."""
        try:
            with self.transport.recording() as recorder:
                self._host.memory.share_recorder(recorder)
                yield recorder
        finally:
            self._host.memory.share_recorder(self.transport.recorder)

    def free(self) -> None:
        """Free memory and transports, also those of split communicators. Repeated calls have no effect. Collective.

        Tensors in its memory must not be used afterwards. MPICH has at most 2048 communicators.
        """
        if self._freed:
            return
        self._freed = True
        while self._parts:
            self._parts.pop().free()
        self._dispatch.free()
        self._host.free()
        if self._detector is not None:
            self._detector.free()
        self._node.free()
        self.transport.free()

    def _compare(self, operation: str, *tensors: Tensor, detail: str = "", where: Tensor | None = None) -> None:
        """Compare the operation that each rank is about to start, if ``HPCTRAIN_CHECK`` enables it. Collective.

        ``where`` is a tensor that must be the same segment of node-shared memory on all ranks, or
        outside of shared memory on all ranks.
        """
        if self._detector is not None:
            location = "" if where is None else self._host.memory.name_of(where)
            self._detector(operation, *tensors, detail=", ".join(filter(None, (detail, location))))
