"""Collectives of a pass: gathers and reductions of parameter groups, which overlap with computation.

Note: the path of a gradient. Autograd computes a fresh gradient and calls its hook. The hook
divides the gradient by the number of ranks while copying it to the flat gradients of its parameter
group. This takes one pass, with the gradient still in cache. The hook then releases the gradient.
When all gradients of a group are computed, the group is reduced into the slices of the owning
ranks, and a later group reuses its memory. All ranks reduce the groups in the same order: the order
in which they were complete on rank 0 in the first backward pass. The order of the gradients on a
rank does not matter. If a gradient is computed before there is memory for its group, it stays in
the tensor that autograd returned.

The set of parameters that any rank has used is known only after the last rank has ended its
backward pass. One message then distributes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import CommStream, StreamWork
from hpctrain.comm.transport.base import Work
from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import RingSlot, ring_slots
from hpctrain.parallel.fsdp.param_group import GroupReduction, ParamGroup

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.setup import ShardingPlan
    from hpctrain.parallel.fsdp.unshard import UnshardOnDemand

# Residency: when parameters are gathered ------------------------------------------------------------------------------


class Residency(ABC):
    """Residency of parameters: unsharded in the passes of the model, sharded between them. Passes are collective."""

    def register_hooks(self, on_backward: Callable[[], None]) -> list[RemovableHandle]:
        """Register hooks on modules inside the model; call ``on_backward`` when backward reaches the first of them."""
        return []

    def mark_stale(self, *, frozen: bool = False) -> None:
        """Mark the unsharded parameters as stale after a change of shards; ``frozen``: of frozen parameters too."""

    def wait_for_readers(self) -> None:
        """Wait until no rank computes with the memory that this rank is about to change."""

    def agree_on_order(self, world: Communicator) -> None:
        """Make the ranks agree on the order of collectives that a pass has recorded."""

    @abstractmethod
    def rejoin(self, plan: ShardingPlan) -> None:
        """Forget the pass in progress, and continue with the ranks that the communicators now have. Collective."""

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
        """Unshard all parameters. Collective."""

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

    def __init__(self, groups: Sequence[ParamGroup], plan: ShardingPlan, stream: CommStream) -> None:
        self._groups, self._stream = groups, stream
        self._handles: list[StreamWork] = []
        self._part: Communicator | None = None  # the ranks of this node, if there are several nodes
        self.rejoin(plan)

    def rejoin(self, plan: ShardingPlan) -> None:
        self._handles.clear()
        self._stale = self._frozen_stale = True
        self._node = self._fence = None
        self._is_common = plan.node_shared and plan.comm.nodes == 1  # all ranks share one memory
        if plan.node_shared:
            if not self._is_common:
                self._part = self._part or plan.comm.split(plan.comm.node)
            self._node = plan.comm if self._is_common else self._part
            assert self._node is not None
            self._fence = self._node.common(64 * self._node.size, torch.uint8, must_share=True)

    def mark_stale(self, *, frozen: bool = False) -> None:
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

    def begin_forward(self, *, records: bool) -> None:
        self.unshard()

    def end_forward(self, *, needs_backward: bool) -> None:
        self.reshard()

    def begin_backward(self, *, reduces: bool) -> None:
        """Register the unsharded parameters, for the recomputation of activations."""
        for group in self._groups:
            group.to_unsharded()

    def end_backward(self) -> None:
        self.reshard()

    def join_pass(self, *, backward: bool) -> None:
        self._gather()

    def unshard(self) -> None:
        """Bring all unsharded parameters up to date, and register them in the modules. Collective."""
        self._gather()
        for group in self._groups:
            group.to_unsharded()

    def reshard(self) -> None:
        """Register the shards again; the unsharded parameters stay in memory."""
        for group in self._groups:
            group.to_sharded()

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
        if self._is_common:
            for group in groups:
                group.copy_in()
            self.wait_for_readers()
        else:
            self._handles += [self._stream.run(group.gather) for group in groups]


# Reduction of the gradients of all groups -----------------------------------------------------------------------------


class GradReduction:
    """Reduction of the gradients of trained parameter groups; the shards receive the average over all ranks.

    ``memory``, in bytes, is the ring buffer for unsharded gradients, which the groups use one after
    another, at the same offsets on all ranks. If it is None, each group allocates memory of its own
    at its first gradient, at most ``limit`` groups at the same time. Gradients are communicated in
    ``dtype``, or in their own dtype if that is None. Without ``early`` all groups are reduced at the
    end of the backward pass, so that no other collective of the pass runs between their reductions.
    ``make_reduction`` creates the reduction of one group. A subclass of ``GroupReduction`` that
    stores slices elsewhere starts its copies in ``after_reduce``.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        plan: ShardingPlan,
        memory: Tensor | None,
        limit: int,
        stream: CommStream,
        *,
        dtype: torch.dtype | None,
        early: bool,
        observer: UnshardOnDemand | None,
        make_reduction: Callable[[ParamGroup, int, int, torch.dtype], GroupReduction],
    ) -> None:
        self._world, self._replicas = plan.world, plan.replicas
        # This rank's factor in the average. It is applied while a gradient is copied, so that no separate
        # pass is needed for the division.
        self.scale = 1.0 / plan.world.size
        self.memory, self._limit = memory, limit
        self._stream, self._early, self._observer = stream, early, observer
        self.reductions: list[GroupReduction] = []
        count = 0
        for number, group in enumerate(groups):
            held = group.members[0].unsharded.dtype
            reduced_as = dtype if dtype and held is torch.float32 else held
            if plan.settings.reproducible:
                reduced_as = group.shard_data.dtype  # sums are not rounded on their way to the shards
            self.reductions.append(make_reduction(group, number, count, reduced_as))
            count += len(group.members)
        self._used = plan.world.empty(count, torch.uint8)
        self._completion_order: list[int] = []  # indices of groups, as they were complete in the first pass
        self._order_is_final = False
        self._set_order(range(len(self.reductions)))

    def _set_order(self, order: Sequence[int]) -> None:
        """Fix the order in which groups are reduced."""
        self._order = [self.reductions[number] for number in order]
        self._position = {reduction.number: position for position, reduction in enumerate(self._order)}
        self._sizes = [reduction.group.layout.numel * reduction.dtype.itemsize for reduction in self._order]
        if self.memory is None:
            self._slots = [RingSlot(0, max(position + 1 - self._limit, 0)) for position in range(len(order))]
        else:
            self._slots = ring_slots(self._sizes, self.memory.numel())
        # numbers of groups, in this order, whose reduction was enqueued and waited for in this pass
        self.started = self._ended = 0

    def rejoin(self, memory: Tensor | None) -> None:
        """Forget the pass in progress, and continue with the ranks that the communicators now have. Collective.

        The order is that of the first rank: others may lack it, or differ if the first pass has failed.
        """
        self.memory = memory
        for reduction in self.reductions:
            reduction.forget()
        self._used = self._world.empty(self._used.numel(), torch.uint8)
        self._completion_order.clear()
        known = self._order_is_final, [reduction.number for reduction in self._order]
        self._order_is_final, order = self._world.broadcast_object(known)
        self._set_order(order)

    def add_gradient(self, reduction: GroupReduction, number: int) -> None:
        """Take the gradient that a parameter of a group has just received; reduce the groups that are complete."""
        if self._position[reduction.number] < self.started and number not in reduction.computed:
            raise UsageError(
                f"the gradient of {reduction.group.members[number].name} came when it had been reduced, in the order "
                "of the first step: let units run in one order, or make one unit of what changes places"
            )
        reduction.add(number)
        if reduction.flat is not None or self._open(reduction):
            reduction.copy_in(number, self.scale)
        else:
            reduction.uncopied.add(number)
        if reduction.complete:
            if not self._order_is_final:
                self._completion_order.append(reduction.number)
            if self._observer is not None:
                self._observer.group_complete(reduction.number)
            if self._early:
                self._reduce_complete()

    def finish(self) -> None:
        """Reduce the remaining groups, wait for all reductions, and assign the gradients to the shards. Collective."""
        used = self._used.numpy()
        for reduction in self.reductions:
            for number, member in enumerate(reduction.group.members):
                used[reduction.first + number] = number in reduction.computed or member.unsharded.grad is not None
        self._start_up_to(len(self._order))
        self._world.all_reduce(self._used, "max")
        used_anywhere = used.astype(bool).tolist()
        for reduction in self._order:
            self._wait(reduction)
            reduction.assign_gradients(used_anywhere[reduction.first : reduction.first + len(reduction.group.members)])
        self.started = self._ended = 0
        if not self._order_is_final:
            self._fix_order()

    def received(self) -> set[str]:
        """Return the names of the parameters that have got a gradient on any rank in the pass that ``finish`` ended."""
        members = (member for reduction in self.reductions for member in reduction.group.members)
        return {member.name for member, is_used in zip(members, self._used.tolist()) if is_used}

    def reduce_up_to(self, number: int) -> None:
        """Reduce the groups up to ``number``, with zeros for gradients that this rank does not compute."""
        self._start_up_to(self._position[number] + 1)

    def _start_up_to(self, end: int) -> None:
        for reduction in self._order[self.started : end]:
            self._start(reduction)

    def _open(self, reduction: GroupReduction) -> bool:
        """Allocate memory for a group; return False if a group that uses this memory is not yet being reduced."""
        position = self._position[reduction.number]
        slot, nbytes = self._slots[position], self._sizes[position]
        if slot.after > self.started:
            return False
        while self._ended < slot.after:
            self._wait(self._order[self._ended])
            self._ended += 1
        if self.memory is None:
            reduction.open(torch.empty(nbytes, dtype=torch.uint8, device=reduction.group.device))
        else:
            reduction.open(self.memory[slot.offset : slot.offset + nbytes])
        return True

    def _reduce_complete(self) -> None:
        while self.started < len(self._order) and self._order[self.started].complete:
            self._start(self._order[self.started])
        if self.started:
            last = self._order[self.started - 1].handle
            if last is not None:
                last.done()  # drives all reductions for which the other ranks are ready

    def _start(self, reduction: GroupReduction) -> None:
        """Enqueue the reduction of a group whose gradients have all been computed."""
        if reduction.flat is None:
            opened = self._open(reduction)
            assert opened, "all earlier groups have been started"
        reduction.copy_missing(self.scale)
        flat, target = reduction.flat, reduction.allocate_target()
        assert flat is not None
        if self._observer is not None:
            self._observer.before_reduction(reduction.number)

        def reduce() -> Work | None:
            work = reduction.group.reduce_scatter(target, flat)
            if self._replicas is not None and self._stream.asynchronous:
                self._replicas.all_reduce(target, "sum")
            if (work is None or work.done()) and (self._replicas is None or self._stream.asynchronous):
                reduction.after_reduce()
            return work

        reduction.handle = self._stream.run(reduce)
        self.started += 1

    def _wait(self, reduction: GroupReduction) -> None:
        """Order subsequent computations after the reduction of a group, and release its memory."""
        if reduction.handle is None:
            return
        reduction.handle.wait()
        if self._replicas is not None and not self._stream.asynchronous:
            assert reduction.target is not None
            self._replicas.all_reduce(reduction.target, "sum")
        reduction.after_reduce()
        reduction.handle = None
        reduction.close()

    def _fix_order(self) -> None:
        """Switch to the order in which rank 0 saw groups complete in the first backward pass."""
        order = self._world.broadcast_object(self._completion_order)
        unseen = [number for number in range(len(self.reductions)) if number not in set(order)]
        self._order_is_final = True
        self._set_order(order + unseen)
