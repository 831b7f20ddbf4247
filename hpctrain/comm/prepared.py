"""Prepared calls of collectives on host tensors: table and choice of the algorithms, cache for repeated use.

Note: preparation takes longer than the reduction of a small tensor. It looks up the tensor's memory,
selects an algorithm, and creates views and MPI's buffer specifications. A prepared call has all of
these bound. It stores addresses but no references to tensors, so a cached call may be used only for
tensors of the same size and dtype at the same addresses: ``call_key``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, double_tree, recursive, ring, tree
from hpctrain.comm.reduction import Reducer, average_scale, transport_op
from hpctrain.comm.shm.memory import SharedMemory, Topology
from hpctrain.comm.transport.base import Finished, PreparedCall, Transport, Work
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout


@dataclass(frozen=True)
class CollectiveCall:
    """Collective and its arguments: flat, contiguous host tensors, and a reduction or a root if it has one."""

    operation: str
    tensor: Tensor
    out: Tensor | None = None
    op: str = ""
    root: int | None = None

    @property
    def whole(self) -> Tensor:
        """Return the tensor that contains the data of all ranks: ``out`` of an all_gather, else ``tensor``."""
        return self.out if self.out is not None and self.out.numel() > self.tensor.numel() else self.tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments in the order of all algorithms: out, tensor, op, root, without those it lacks."""
        out = () if self.out is None else (self.out,)
        op = (self.op,) if self.op else ()
        return (*out, self.tensor, *op, *(() if self.root is None else (self.root,)))

    def without_references(self) -> CollectiveCall:
        """Return this call on the same memory, without references to the tensors."""
        return replace(
            self,
            tensor=_unowned_view(self.tensor),
            out=None if self.out is None else _unowned_view(self.out),
        )


# Algorithms: factories of prepared calls ------------------------------------------------------------------------------

Factory = Callable[["FlatHostCollectives", CollectiveCall], PreparedCall]


def by_messages(algorithm: Callable[..., object]) -> Factory:
    """Return the factory of an algorithm that sends messages: a function of the transport and the arguments."""

    def prepare(host: FlatHostCollectives, call: CollectiveCall) -> PreparedCall:
        reducer = (host.reducer,) if call.op else ()
        return partial(algorithm, host.transport, *reducer, *call.arguments)

    return prepare


def by_mpi(host: FlatHostCollectives, call: CollectiveCall) -> PreparedCall:
    """Prepare the MPI library's own collective; an average is a sum that is scaled afterwards."""
    prepare = getattr(host.transport, f"prepared_{call.operation}")
    run: PreparedCall = prepare(*replace(call, op=transport_op(call.op)).arguments)
    scale = average_scale(call.op, host.transport.size)
    if scale is None or call.root not in (None, host.transport.rank):
        return run
    result = call.tensor if call.out is None else call.out

    def scaled() -> None:
        run()
        result.mul_(scale)

    return scaled


def in_node_memory(host: FlatHostCollectives, call: CollectiveCall) -> PreparedCall:
    """Prepare a collective in node-shared memory, and by messages between nodes if there are several."""
    return host.memory.node.prepare(call.operation, call.whole, call.arguments)


NODE_ALGORITHMS = ("window", "hierarchical")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")  # the other operations copy data, equally for every dtype

_BY_MESSAGES = {"direct": direct, "tree": tree, "ring": ring, "recursive": recursive, "double_tree": double_tree}
_NAMES = {
    "all_reduce": ("mpi", "direct", "tree", "ring", "recursive", "double_tree", "window", "hierarchical"),
    "reduce_scatter": ("mpi", "direct", "ring", "recursive", "window", "hierarchical"),
    "reduce": ("mpi", "tree", "double_tree", "window"),
    "all_gather": ("mpi", "ring", "recursive", "window", "hierarchical"),
    "broadcast": ("mpi", "tree", "ring", "double_tree", "window", "hierarchical"),
}


def _factory(operation: str, name: str) -> Factory:
    if name in _BY_MESSAGES:
        return by_messages(getattr(_BY_MESSAGES[name], operation))
    return in_node_memory if name in NODE_ALGORITHMS else by_mpi


# Every algorithm of every collective of host tensors. Selection, checks of names, tables and measurements
# derive from this table what exists. If no table of measurements names an applicable algorithm, the first
# applicable one of a row is used; messages support every dtype.
ALGORITHMS: Mapping[str, Mapping[str, Factory]] = {
    operation: {name: _factory(operation, name) for name in names} for operation, names in _NAMES.items()
}


def check_known(operation: str, algorithm: str) -> None:
    """Raise ``CommunicationError`` for an algorithm that a collective of host tensors does not have."""
    if algorithm not in ("auto", *ALGORITHMS[operation]):
        known = ", ".join(sorted(ALGORITHMS[operation]))
        raise CommunicationError(f"unknown algorithm {algorithm!r} of {operation}: known are auto, {known}")


# Cache ----------------------------------------------------------------------------------------------------------------


class PreparedCallCache(dict[Hashable, Callable[..., Any]]):
    """Prepared calls by ``call_key``; it is emptied when ``limit`` is reached.

    A program that never reuses a tensor must not fill the memory.
    """

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Hashable, call: Callable[..., Any]) -> None:
        if len(self) >= self._limit:
            self.clear()
        super().__setitem__(key, call)


def call_key(operation: str, tensor: Tensor, out: Tensor | None, op: str, root: int | None, algorithm: str) -> Hashable:
    """Return the cache key of a collective; a cached call needs no second check of its arguments."""
    if out is None:
        return operation, tensor.data_ptr(), tensor.numel(), tensor.dtype, op, root, algorithm
    sizes = out.numel(), tensor.numel(), out.dtype, tensor.dtype
    return operation, out.data_ptr(), tensor.data_ptr(), sizes, op, root, algorithm


def message_key(operation: str, tensor: Tensor, peer: int, tag: int) -> Hashable:
    """Return the cache key of a blocking message."""
    return operation, tensor.data_ptr(), tensor.numel(), tensor.dtype, peer, tag


# Host memory of tensors -----------------------------------------------------------------------------------------------


@contextmanager
def as_flat(tensor: Tensor | None, *, back: bool = True, on: torch.device = torch.device("cpu")) -> Iterator[Any]:
    """Yield a flat, contiguous tensor of the same content on a device; copy it ``back`` afterwards if it is a copy.

    A rank without a tensor gets None.
    """
    plain = None if tensor is None else tensor.detach()
    if plain is None or plain.device == on and plain.is_contiguous():
        yield None if plain is None else plain.view(-1)
        return
    packed = plain.contiguous().to(on)
    yield packed.view(-1)
    if back:
        plain.copy_(packed)


def _unowned_view(tensor: Tensor) -> Tensor:
    """Return a flat tensor of the same host memory that holds no reference to it."""
    from mpi4py import MPI

    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)


# Preparation ----------------------------------------------------------------------------------------------------------


def choose(
    operation: str,
    algorithm: str,
    unavailable: Mapping[str, str],
    tables: tuple[AlgorithmTable, ...] = (),
    *,
    location: str = "host",
    kind: str = "carried",
    nbytes: int = 0,
) -> str:
    """Return the named algorithm, or for ``auto`` the first one in the tables that is applicable.

    All ranks pass the same data, so all choose the same. ``unavailable`` maps each algorithm of the
    operation to the reason why it is not applicable (empty if it is). Raises ``CommunicationError``
    for an algorithm that is unknown or not applicable.
    """
    if algorithm != "auto":
        check_known(operation, algorithm)
        if unavailable[algorithm]:
            able = ", ".join(sorted(name for name, why in unavailable.items() if not why))
            raise CommunicationError(
                f"algorithm {algorithm} cannot do this {operation}: {unavailable[algorithm]}; able are auto, {able}"
            )
        return algorithm
    wanted: list[str | None] = [table.best(operation, location, kind, nbytes) for table in tables]
    wanted += unavailable
    for name in wanted:
        if name is not None and unavailable.get(name, "unknown") == "":
            return name
    reasons = "; ".join(f"{name}: {why}" for name, why in unavailable.items())
    raise CommunicationError(f"no algorithm supports {operation} of this tensor: {reasons}")


class FlatHostCollectives:
    """Collectives of flat, contiguous host tensors: each call is prepared once and cached.

    Shares of ``reduce_scatter`` and ``all_gather`` are equal.
    """

    def __init__(self, transport: Transport, node: Transport, topology: Topology, default: AlgorithmTable) -> None:
        self.transport = transport
        self.reducer = Reducer()
        self.memory = SharedMemory(transport, node, topology, self.reducer)
        self.cache = PreparedCallCache()
        self._default = default
        self._tables: tuple[AlgorithmTable, ...] = (default,)

    def use_tables(self, tables: Mapping[RankLayout, AlgorithmTable]) -> None:
        """Choose algorithms by measured tables, the same on all ranks; use the defaults for missing entries."""
        measured = tables.get(self._default.layout)
        self._tables = (self._default,) if measured is None else (measured, self._default)
        self.cache.clear()

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool = False, must_share: bool = False) -> Tensor:
        """Return a flat tensor, in node memory if available. Collective."""
        self.cache.clear()  # the new tensor may reuse an address that was private memory on this rank only
        return self.memory.empty(numel, dtype, common=common, must_share=must_share)

    def run(self, call: CollectiveCall, algorithm: str = "auto") -> None:
        """Run a collective. Collective."""
        if self.transport.size == 1 or not call.tensor.numel():
            check_known(call.operation, algorithm)
            if call.out is not None:
                call.out.copy_(call.tensor)
            return
        key = call_key(call.operation, call.tensor, call.out, call.op, call.root, algorithm)
        prepared = self.cache.get(key)
        if prepared is None:
            prepared = self.cache[key] = self._prepare(call, algorithm)
        prepared()

    def start(self, call: CollectiveCall, algorithm: str = "auto") -> Work:
        """Start a reduction; only a reduction in node memory remains in progress on return. Collective."""
        key = call_key(f"start_{call.operation}", call.tensor, call.out, call.op, call.root, algorithm)
        prepared = self.cache.get(key)
        if prepared is None:
            if not self._remains_in_progress(call, algorithm):
                self.run(call, algorithm)
                return Finished()
            unowned, node = call.without_references(), self.memory.node
            prepared = self.cache[key] = node.prepare_start(call.operation, unowned.tensor, unowned.arguments)
        work: Work = prepared() if call.out is None else prepared(call.out)
        return work

    def message(self, operation: str, tensor: Tensor, peer: int, tag: int) -> None:
        """Make a blocking ``send`` or ``recv``."""
        key = message_key(operation, tensor, peer, tag)
        prepared = self.cache.get(key) or self.transport.prepared_message(operation, tensor, peer, tag)
        if prepared is None:
            getattr(self.transport, operation)(tensor, peer, tag)
            return
        self.cache[key] = prepared
        prepared()

    def free(self) -> None:
        """Free node memory. Collective."""
        self.cache.clear()
        self.memory.free()

    def _prepare(self, call: CollectiveCall, algorithm: str) -> PreparedCall:
        """Select the algorithm and bind its arguments; use messages if /dev/shm has no space for node memory."""
        location = self.memory.location_of(call.whole)
        if call.operation == "all_gather" and location == "window" and self.memory.node.is_common(call.whole):
            # One tensor for all ranks of a node: with any other algorithm each of them would write
            # the whole tensor.
            algorithm = self.memory.algorithm if algorithm == "auto" else algorithm
        factories = ALGORITHMS[call.operation]
        unavailable, kind = dict.fromkeys(factories, ""), "carried"
        if call.op and not self.transport.reduces(call.tensor.dtype, transport_op(call.op)):
            unavailable["mpi"] = f"MPI does not reduce {call.tensor.dtype} by {call.op} as torch does"
            kind = "own"
        for name in set(NODE_ALGORITHMS) & set(factories):
            unavailable[name] = self.memory.why_unavailable(name, call.operation, location)
        select = partial(
            choose,
            call.operation,
            algorithm,
            tables=self._tables,
            location=location,
            kind=kind,
            nbytes=call.whole.nbytes,
        )
        chosen, unowned = select(unavailable), call.without_references()
        try:
            return factories[chosen](self, unowned)
        except CommunicationError as error:
            if chosen not in NODE_ALGORITHMS or algorithm == chosen or not self.memory.lacks_space(error):
                raise
        unavailable |= dict.fromkeys(NODE_ALGORITHMS, "there is no space for it in /dev/shm")
        return factories[select(unavailable)](self, unowned)

    def _remains_in_progress(self, call: CollectiveCall, algorithm: str) -> bool:
        if not call.tensor.numel() or self.memory.location_of(call.tensor) != "window":
            return False
        named = algorithm in NODE_ALGORITHMS and not self.memory.why_unavailable(algorithm, call.operation, "window")
        return algorithm == "auto" or named
