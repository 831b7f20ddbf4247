"""Residency of parameters: communication stream, units, and the residency that keeps parameters unsharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import Streams
from hpctrain.comm.transport.base import Work
from hpctrain.parallel.fsdp.param_group import ParamGroup

# Communication stream -------------------------------------------------------------------------------------------------
#
# Note: a separate stream for communication. On a GPU, collectives run on a stream next to the
# computing stream. A collective first waits on this stream for the computations that were enqueued
# before it (an event). If its result is needed, the computing stream waits for the collective
# (another event). The host waits for neither. On a CPU, a collective is complete when it returns, or,
# in memory that the node shares, still in progress. Then each call of its handle drives its progress.


class StreamWork:
    """Handle of one collective that was enqueued on a ``CommStream``."""

    def __init__(self, stream: CommStream, event: Any, work: Work | None) -> None:
        self._stream, self._event, self._work = stream, event, work

    def done(self) -> bool:
        """Return whether the operation is complete for this host, and drive its progress if it is not."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Order subsequent computations after the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._stream.join(self._event)


class CommStream:
    """Communication stream, which runs collectives in the order in which they are enqueued."""

    def __init__(self, streams: Streams) -> None:
        # the host can enqueue a collective before the previous one is complete
        self.asynchronous = streams.device.type != "cpu"
        self._streams = streams
        self._stream = streams.new()

    def run(self, collective: Callable[[], Work | None]) -> StreamWork:
        """Enqueue a collective, and return its handle."""
        if not self.asynchronous:
            return StreamWork(self, None, collective())
        streams = self._streams
        streams.wait(self._stream, streams.record(streams.current()))
        with streams.on(self._stream):
            work = collective()
        return StreamWork(self, streams.record(self._stream), work)

    def join(self, event: Any) -> None:
        """Make the computing stream wait for an event of the communication stream."""
        if event is not None:
            self._streams.wait(self._streams.current(), event)


# Residency ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UnitState:
    """State of one unit: its parameter groups, and whether they are unsharded."""

    number: int
    name: str
    module: nn.Module
    groups: list[ParamGroup]
    handles: list[StreamWork] = field(default_factory=list)  # of its all-gathers until they have been waited for
    gathered: bool = False
    unsharded: bool = False

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers of the unit, and register its unsharded parameters in the module."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        if not self.unsharded:
            self.unsharded = True
            for group in self.groups:
                group.to_unsharded()

    def to_sharded(self) -> None:
        """Register the shards in the module."""
        if self.unsharded:
            self.unsharded = False
            for group in self.groups:
                group.to_sharded()

    def reshard(self) -> None:
        """Reshard the unit: free the memory of its unsharded parameters."""
        self.to_sharded()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        if self.gathered:
            self.gathered = False
            for group in self.groups:
                group.free()


class Residency(ABC):
    """Residency of parameters: unsharded in the passes of the model, sharded between them. Passes are collective."""

    def register_hooks(self, model: nn.Module, on_backward: Callable[[], None]) -> list[RemovableHandle]:
        """Register hooks on modules inside the model; call ``on_backward`` when backward reaches the first of them."""
        return []

    def mark_stale(self, *, frozen: bool = False) -> None:
        """Mark the unsharded parameters as stale after a change of shards; ``frozen``: of frozen parameters too."""

    def wait_for_readers(self) -> None:
        """Wait until no rank computes with the memory that this rank is about to change."""

    def agree_on_order(self, world: Communicator) -> None:
        """Make the ranks agree on the order of collectives that a pass has recorded."""

    @abstractmethod
    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; ``records``: a backward pass may follow."""

    @abstractmethod
    def end_forward(self, *, needs_backward: bool) -> None:
        """End the forward pass; ``needs_backward``: a backward pass may follow."""

    @abstractmethod
    def begin_backward(self, *, reduces: bool) -> None:
        """Begin a backward pass; ``reduces``: its gradients are reduced."""

    @abstractmethod
    def end_backward(self) -> None:
        """End the backward pass."""

    @abstractmethod
    def join_pass(self, *, backward: bool) -> None:
        """Take part in the collectives of a pass without computing."""

    @abstractmethod
    def unshard(self) -> None:
        """Unshard all parameters."""

    @abstractmethod
    def reshard(self) -> None:
        """Reshard all parameters."""


# Unsharded parameters that stay in memory and are gathered once after each change -------------------------------------
#
# Note: shards in memory that the node shares. If the ranks of a node share memory, the unsharded
# parameters exist once per node. The shards of a rank are its slices of them, which its optimizer
# updates in place. Then gathering all parameters is one barrier without a copy. Between nodes, each
# rank fetches its part of what other nodes own. Two barriers separate readers and writers: one before
# an update, because another rank may still compute with the old values, and one before the next pass.
# If no memory is shared, each rank has its own copy of the unsharded parameters (ZeRO 1 and 2).


class KeepUnsharded(Residency):
    """Residency that keeps all parameters unsharded, and gathers them if they are stale."""

    def __init__(
        self, groups: Sequence[ParamGroup], comm: Communicator, stream: CommStream, *, node_shared: bool
    ) -> None:
        self._groups, self._comm, self._stream = groups, comm, stream
        self._node_shared = node_shared
        self._stale, self._frozen_stale = True, True
        self._handles: list[StreamWork] = []
        self._node = self._fence = None
        if node_shared:
            self._node = comm if comm.nodes == 1 else comm.split(comm.node)
            self._fence = self._node.common(64 * self._node.size, torch.uint8, must_share=True)

    def mark_stale(self, *, frozen: bool = False) -> None:
        """Mark the unsharded parameters as stale after a change of shards; ``frozen``: of frozen parameters too."""
        self._stale, self._frozen_stale = True, self._frozen_stale or frozen
        if self._stream.asynchronous and not frozen:
            self._start_gather()  # overlaps with the work of the caller between two steps

    def wait_for_readers(self) -> None:
        """Wait until no rank on the node computes with the parameters any more, if they are in shared memory.

        A gather in progress has to end first, because it writes to the memory that an update is
        about to change.
        """
        self._wait()
        if self._node is not None and self._fence is not None:
            self._node.all_gather(self._fence, self._fence.chunk(self._node.size)[self._node.rank])

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Bring the unsharded parameters up to date, and register them in the modules. Collective."""
        self._gather()
        self._register(unsharded=True)

    def end_forward(self, *, needs_backward: bool) -> None:
        """Register the shards again."""
        self._register(unsharded=False)

    def begin_backward(self, *, reduces: bool) -> None:
        """Register the unsharded parameters, for the recomputation of activations."""
        self._register(unsharded=True)

    def end_backward(self) -> None:
        """Register the shards again."""
        self._register(unsharded=False)

    def unshard(self) -> None:
        """Bring all unsharded parameters up to date, and register them in the modules. Collective."""
        self._gather()
        self._register(unsharded=True)

    def reshard(self) -> None:
        """Register the shards again."""
        self._register(unsharded=False)

    def join_pass(self, *, backward: bool) -> None:
        """Take part in the collectives of a pass without computing."""
        self._gather()

    # Internals --------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Bring the unsharded parameters up to date, and order subsequent computations after this."""
        if self._stale:
            self._start_gather()
        self._wait()

    def _wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()

    def _start_gather(self) -> None:
        groups = [group for group in self._groups if group.trained or self._frozen_stale]
        self._stale = self._frozen_stale = False
        if self._node_shared and self._comm.nodes == 1:
            for group in groups:
                group.copy_in()
            self.wait_for_readers()
        else:
            self._handles += [self._stream.run(group.gather) for group in groups]

    def _register(self, *, unsharded: bool) -> None:
        for group in self._groups:
            group.to_unsharded() if unsharded else group.to_sharded()
