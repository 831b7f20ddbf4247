"""Process group of torch.distributed over a communicator: every operation of gloo.

``HpctrainGroup`` is the whole ``ProcessGroup``: torch's C++ classes (DDP, functional collectives,
DTensor) and its Python functions call the methods of this class. Names of operations changed
between torch 2.11 and 2.14; both generations are defined.
"""

# mypy: disable-error-code="override, assignment"
# The stubs of torch name arguments in several ways; its callers pass them by position.

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.torch_backend import arguments
from hpctrain.torch_backend.arguments import only, reduction_of, root_of, rows
from hpctrain.torch_backend.called import is_large
from hpctrain.torch_backend.calls import GroupCalls
from hpctrain.torch_backend.exchange import TensorExchange, packed, unpack
from hpctrain.torch_backend.work import CombinedWork, GroupWork

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class HpctrainGroup(dist.ProcessGroup):
    """Process group over the ranks of a communicator, which it frees."""

    supports_coalescing = supports_splitting = False  # torch asks back ends

    def __init__(
        self, comm: Communicator, store: Any, timeout: timedelta, name: str, backend_name: str = "hpctrain"
    ) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._comm = comm
        self._store = store
        self._backend_name = backend_name
        self._description = "undefined"
        self._calls = GroupCalls(comm, timeout, name, backend_name)
        self._exchange = TensorExchange(comm)
        self._coalesced: list[GroupWork] | None = None
        self._device: torch.device | None = None  # of tensors on a GPU, once there was one

    @property
    def comm(self) -> Communicator:
        """Return the communicator of the group: tensors of its ``empty`` are reduced in place in node memory."""
        return self._comm

    # Names and properties ---------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return self._backend_name

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        """Return the name that torch has given to the group."""
        return self._calls.name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._calls.name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which an operation of this group fails."""
        self._calls.timeout = timeout

    _set_default_timeout = set_timeout  # torch calls it on what _get_backend returns

    def _get_backend(self, device: torch.device) -> Any:
        """Return the back end of a device: this group, which torch 2.14 asks before each batch of messages."""
        return self

    # Reductions -------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        """Reduce a tensor over all ranks, in place; sparse tensors are summed."""
        tensor, op = only(tensors), reduction_of(opts)
        op.check(tensor)
        reduce = lambda: self._exchange.all_reduce(tensor, op)  # noqa: E731
        return self._run("all_reduce", reduce, [tensor], opts, str(op), large=is_large(tensor))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        """Reduce several tensors over all ranks, as one."""
        op = reduction_of(opts)
        arguments.check_same_dtype("all_reduce_coalesced", tensors)
        arguments.check_reduction(op, tensors)
        reduce = lambda: self._exchange.all_reduce_coalesced(tensors, op)  # noqa: E731
        return self._run("all_reduce_coalesced", reduce, tensors, opts, str(op))

    def reduce(self, tensors: list[Tensor], opts: Any = None, op: Any = None) -> GroupWork:
        """Reduce a tensor into that of the root."""
        tensor, root = only(tensors), root_of(opts, self.size())
        kind = reduction_of(opts if hasattr(opts, "reduceOp") else op)
        kind.check(tensor)
        reduce = lambda: self._exchange.reduce(tensor, kind, root)  # noqa: E731
        return self._run("reduce", reduce, [tensor], opts, f"{kind}, root {root}")

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> GroupWork:
        """Reduce lists of tensors over all ranks; store the tensor of each rank there."""
        output, tensors, op = only(outputs), rows(inputs), reduction_of(opts)
        arguments.check_one_per_rank("reduce_scatter", tensors, self.size())
        arguments.check_same_dtype("reduce_scatter", [output, *tensors])
        arguments.check_equal_sizes("reduce_scatter", [output], tensors[self.rank()].numel())
        op.check(output)
        reduce = lambda: self._exchange.reduce_scatter_list(output, tensors, op)  # noqa: E731
        return self._run("reduce_scatter", reduce, [output], opts, str(op), tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Reduce a tensor over all ranks; store the slice of each rank there."""
        op = reduction_of(opts)
        op.check(output)
        arguments.check_shares("reduce_scatter_tensor", output, tensor, self.size())
        reduce = lambda: self._exchange.reduce_scatter(output, tensor, op)  # noqa: E731
        return self._run("reduce_scatter_tensor", reduce, [output], opts, str(op), [tensor])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> GroupWork:
        """Reduce several tensors over all ranks; store the slices of each rank there."""
        op = reduction_of(opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            op.check(output)
            arguments.check_shares("reduce_scatter_tensor_coalesced", output, tensor, self.size())

        def reduce() -> None:
            for output, tensor in zip(outputs, inputs):
                self._exchange.reduce_scatter(output, tensor, op)

        return self._run("reduce_scatter_tensor_coalesced", reduce, outputs, opts, str(op), inputs)

    # Copies -----------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        """Copy the root's tensor to all ranks."""
        tensor, root = only(tensors), root_of(opts, self.size())
        return self._run("broadcast", lambda: self._exchange.broadcast(tensor, root), [tensor], opts, f"root {root}")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Store the tensor of each rank in a list; sizes may differ between ranks."""
        results, tensor = rows(outputs), only(inputs)
        arguments.check_one_per_rank("all_gather", results, self.size())
        arguments.check_same_dtype("all_gather", [tensor, *results])
        arguments.check_equal_sizes("all_gather", [tensor], results[self.rank()].numel())
        gather = lambda: self._exchange.all_gather_list(results, tensor)  # noqa: E731
        return self._run("all_gather", gather, results, opts, "", results, [tensor])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Store the tensors of all ranks in one tensor."""
        arguments.check_shares("all_gather_into_tensor", tensor, output, self.size())
        gather = lambda: self._exchange.all_gather(output, tensor)  # noqa: E731
        return self._run("all_gather_into_tensor", gather, [output], opts, "", [tensor], [tensor])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Store several tensors of each rank in lists: one list per rank."""
        for row in outputs:
            if len(row) != len(inputs):
                raise ValueError(f"all_gather_coalesced: {len(row)} outputs of a rank for {len(inputs)} inputs")
        arguments.check_one_per_rank("all_gather_coalesced", [row[0] for row in outputs], self.size())

        def gather() -> None:
            for index, tensor in enumerate(inputs):
                self._exchange.all_gather_list([row[index] for row in outputs], tensor)

        results = [each for row in outputs for each in row]
        return self._run("all_gather_coalesced", gather, results, opts, "", inputs, inputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Store the tensors of all ranks in one tensor, for several at once."""
        for output, tensor in zip(outputs, inputs, strict=True):
            arguments.check_shares("all_gather_into_tensor_coalesced", tensor, output, self.size())

        def gather() -> None:
            for output, tensor in zip(outputs, inputs):
                self._exchange.all_gather(output, tensor)

        return self._run("all_gather_into_tensor_coalesced", gather, outputs, opts, "", inputs, inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Store the tensor of each rank in a list of the root."""
        tensor, root = only(inputs), root_of(opts, self.size())
        results = None
        if root == self.rank():
            results = rows(outputs)
            arguments.check_one_per_rank("gather", results, self.size())
            arguments.check_same_dtype("gather", [tensor, *results])
            arguments.check_equal_sizes("gather", results, tensor.numel())
        gather = lambda: self._exchange.gather(results, tensor, root)  # noqa: E731
        return self._run("gather", gather, results or [], opts, f"root {root}", [tensor], [tensor])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> GroupWork:
        """Store one tensor of the root's list on each rank."""
        output, root = only(outputs), root_of(opts, self.size())
        tensors = None
        if root == self.rank():
            tensors = rows(inputs)
            arguments.check_one_per_rank("scatter", tensors, self.size())
            arguments.check_same_dtype("scatter", [output, *tensors])
            arguments.check_equal_sizes("scatter", tensors, output.numel())
        scatter = lambda: self._exchange.scatter(output, tensors, root)  # noqa: E731
        return self._run("scatter", scatter, [output], opts, f"root {root}", None, tensors or [output])

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> GroupWork:
        """Send rows of a tensor to each rank, and store the received rows; without sizes, equal numbers of them."""
        arguments.check_same_dtype("all_to_all", [output, tensor])
        incoming = arguments.elements_per_rank(output, received, self.size())
        outgoing = arguments.elements_per_rank(tensor, sent, self.size())
        detail = arguments.described([output])
        exchange = lambda: self._exchange.all_to_all(output, tensor, incoming, outgoing)  # noqa: E731
        return self._run("all_to_all", exchange, [output], opts, detail, [], [tensor])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Send one tensor to each rank, and store the received ones."""
        arguments.check_one_per_rank("all_to_all", outputs, self.size())
        arguments.check_one_per_rank("all_to_all", inputs, self.size())
        arguments.check_same_dtype("all_to_all", [*outputs, *inputs])
        exchange = lambda: self._exchange.all_to_all_list(outputs, inputs)  # noqa: E731
        return self._run("all_to_all", exchange, outputs, opts, arguments.described(outputs), [], inputs)

    # Barriers ---------------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        """Wait until all ranks have called it."""
        return self._run("barrier", self._comm.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; rank 0 names those that have not within the timeout."""
        self._calls.monitored_barrier(timeout, name_all=wait_all_ranks)

    # Former names, which torch 2.11 and 2.12 call
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _run(
        self,
        what: str,
        operation: Callable[[], object],
        tensors: Sequence[Tensor],
        opts: Any,
        detail: str = "",
        compared: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
        large: bool = False,
    ) -> GroupWork:
        """Carry out a collective within its timeout, at once or on the thread of the group."""
        on_device = bool(tensors) and tensors[0].is_cuda
        if on_device and self._device is None:
            self._use_device(tensors[0].device)
        work = self._calls.collective(
            what,
            operation,
            tensors,
            seconds=arguments.seconds_of(opts, self._calls.timeout),
            # The streams of the caller's thread order the operations of a GPU; they have begun on return.
            async_op=getattr(opts, "asyncOp", True) and not on_device,
            compared=tensors if compared is None else compared,
            detail=detail,
            inputs=inputs,
            large=large,
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _use_device(self, device: torch.device) -> None:
        """Set up the paths of tensors on a GPU, at the first such tensor. Collective."""
        seconds = self._calls.timeout.total_seconds()
        self._calls.collective("use_device", lambda: self._comm.use_device(device), seconds=seconds, async_op=False)
        self._device = device

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> GroupWork:
        """Start to send a tensor to a rank."""
        tensor = only(tensors)
        flat = packed(tensor)
        return self._message("send", lambda: self._comm.isend(flat, rank, tag), [tensor])

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> GroupWork:
        """Start to receive a tensor from a rank."""
        tensor = only(tensors)
        flat = packed(tensor, written=True)
        start, after = lambda: self._comm.irecv(flat, rank, tag), lambda: unpack(flat, tensor)
        return self._message("recv", start, [tensor], source=lambda handle: rank, after=after)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> GroupWork:
        """Start to receive a tensor from the first rank that sends one."""
        tensor = only(tensors)
        flat = packed(tensor, written=True)
        transport: Any = self._comm.transport
        return self._message(
            "recvAnySource",
            lambda: transport.irecv_any(flat, tag),
            [tensor],
            source=lambda handle: int(handle.source),
            after=lambda: unpack(flat, tensor),
        )

    recvAnysource = recv_anysource

    def _message(self, what: str, start: Callable[[], Any], tensors: Sequence[Tensor], **options: Any) -> GroupWork:
        if tensors[0].is_cuda and self._device is None:
            self._use_device(tensors[0].device)
        work = self._calls.message(what, start, tensors, **options)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Coalescing and lifecycle -----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    def abort(self) -> None:
        """Make operations in progress, and later ones, fail."""
        self._calls.break_group("it was aborted")

    def shutdown(self) -> None:
        """Complete what is queued, and free the communicator."""
        self._calls.close(self._comm.free)
