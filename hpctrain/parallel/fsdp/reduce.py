"""Gradient reduction for sharded data parallelism, overlapped with the backward pass; each rank keeps its slice.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Work
from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import ring_slots
from hpctrain.parallel.fsdp.param_group import ParamGroup
from hpctrain.parallel.fsdp.residency import CommStream, StreamWork

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.unshard import UnshardOnDemand


@dataclass(eq=False)
class GroupReduction:
    """Reduction of the gradients of one parameter group: their unsharded buffer, its state, and the reduced slice."""

    group: ParamGroup
    number: int  # index among the parameter groups
    first: int  # index of the group's first parameter among the parameters of all groups
    dtype: torch.dtype  # dtype of the gradients in communication
    # indices within the group of the parameters whose gradient has been computed
    computed: set[int] = field(default_factory=set)
    # those of ``computed`` whose gradient is not yet copied to the flat buffer
    uncopied: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    handle: StreamWork | None = None
    target: Tensor | None = None  # output of the reduce-scatter: the slice of this rank
    _views: list[Tensor] = field(default_factory=list)
    _slice: Tensor | None = None  # this rank's slice of the gradients; its memory is reused in each step

    @property
    def nbytes(self) -> int:
        """Return the size of the unsharded gradients in bytes."""
        return self.group.layout.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Return whether the gradients of all parameters of the group have been computed."""
        return len(self.computed) == len(self.group.members)

    def open(self, memory: Tensor) -> None:
        """Use ``memory``, given as bytes, as the buffer of the unsharded gradients."""
        layout, end = self.group.layout, 0
        self.flat, self._views = memory.view(self.dtype), []
        for member, offset, numel in zip(self.group.members, layout.offsets, layout.numels):
            self.flat[end:offset].zero_()  # padding is reduced too, and must stay finite
            end = offset + numel
            self._views.append(self.flat[offset:end].view(member.shape))
        self.flat[end:].zero_()

    def copy_in(self, number: int, scale: float) -> None:
        """Write ``scale`` x a parameter's gradient to the buffer in one pass, then release the gradient.

        Writes zeros if the parameter has no gradient. A scale of 0 writes zeros even if the
        gradient is infinite or NaN.
        """
        unsharded, view = self.group.members[number].unsharded, self._views[number]
        if unsharded.grad is None or scale == 0:
            view.zero_()
        else:
            torch.mul(unsharded.grad, scale, out=view)
        unsharded.grad = None

    def allocate_target(self) -> Tensor:
        """Return the buffer for this rank's slice: the one of the last step, or a new one if they accumulate there."""
        group = self.group
        if self._slice is None:
            self._slice = torch.zeros_like(group.shard_data)
        adds = any(member.shard.grad is not None for member in group.members)
        if adds or self.dtype is not group.shard_data.dtype:
            self.target = torch.empty(group.layout.slice_numel, dtype=self.dtype, device=group.shard_data.device)
        else:
            self.target = self._slice
        return self.target

    def after_reduce(self) -> None:
        """Process this rank's slice, which ``target`` holds or will hold after enqueued work; does nothing here."""

    def close(self) -> None:
        """Release the buffer of the unsharded gradients."""
        self.flat, self._views = None, []

    def assign_gradients(self, used: list[bool]) -> None:
        """Assign the reduced gradients to the shards.

        ``used`` marks the parameters that have a gradient on any rank. The others keep the gradient
        that they had, as in a backward pass without sharding.
        """
        assert self._slice is not None and self.target is not None
        for member, is_used in zip(self.group.members, used):
            begin, end = member.held.offset, member.held.offset + member.held.numel
            if not is_used:
                continue
            new, shard = self.target[begin:end].view(member.shard.shape), member.shard
            if shard.grad is not None:
                shard.grad.add_(new)
                continue
            accumulated = self._slice[begin:end].view(shard.shape)
            shard.grad = accumulated if self.target is self._slice else accumulated.copy_(new)
        self.target = None
        self.computed.clear()


# Reduction of all groups ----------------------------------------------------------------------------------------------


class GradReduction:
    """Reduction of the gradients of trained parameter groups; the shards receive the average over all ranks.

    The ranks of ``comm`` share one replica of the model. ``replicas``, if given, connects the ranks
    that hold the same slice of each replica. ``world`` holds all ranks. Gradients are communicated
    in ``dtype``, or in their own dtype if that is None. Without ``early`` all groups are reduced at
    the end of the backward pass, so that no other collective of the pass runs between their
    reductions. ``make_reduction`` creates the reduction of one group. A subclass of
    ``GroupReduction`` that stores slices elsewhere starts its copies in ``after_reduce``.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        comm: Communicator,
        world: Communicator,
        replicas: Communicator | None,
        buffers: BufferPool,
        stream: CommStream,
        *,
        dtype: torch.dtype | None = None,
        early: bool = True,
        observer: UnshardOnDemand | None = None,
        make_reduction: Callable[[ParamGroup, int, int, torch.dtype], GroupReduction] = GroupReduction,
    ) -> None:
        self._comm, self._world, self._replicas = comm, world, replicas
        self.sample_weight = 1.0  # of this rank's gradients in the average over all ranks
        self.buffers, self._stream, self._early, self._observer = buffers, stream, early, observer
        self.reductions: list[GroupReduction] = []
        count = 0
        for number, group in enumerate(groups):
            held = group.members[0].unsharded.dtype
            reduced_as = dtype if dtype and held is torch.float32 else held
            self.reductions.append(make_reduction(group, number, count, reduced_as))
            count += len(group.members)
        self._used = world.empty(count, torch.uint8)
        self._completion_order: list[int] = []  # indices of groups, as they were complete in the first pass
        self._order_is_final = False
        self.records_received = False
        self.received: set[str] = set()  # names of parameters with a gradient in the last pass, if requested
        self._set_order(list(range(len(self.reductions))))

    def _set_order(self, order: Sequence[int]) -> None:
        """Fix the order in which groups are reduced."""
        self._order = [self.reductions[number] for number in order]
        self._position = {reduction.number: position for position, reduction in enumerate(self._order)}
        self.buffers.set_sizes([reduction.nbytes for reduction in self._order])
        self.started = 0  # number of groups, in this order, whose reduction has been enqueued in this pass

    @property
    def _scale(self) -> float:
        """Return this rank's factor in the average.

        It is applied while a gradient is copied, so that no separate pass is needed for the
        division.
        """
        return self.sample_weight / self._world.size

    # Gradients during the backward pass -------------------------------------------------------------------------------

    def add_gradient(self, reduction: GroupReduction, number: int) -> None:
        """Take the gradient that a parameter of a group has just received; reduce the groups that are complete."""
        self._check(reduction, number)
        reduction.computed.add(number)
        if reduction.flat is not None or self._open(reduction):
            reduction.copy_in(number, self._scale)
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
        for reduction in self._order[self.started :]:
            self._start(reduction)
        self._world.all_reduce(self._used, "max")
        used_anywhere = used.astype(bool).tolist()
        self.received = (
            {
                member.name
                for reduction in self.reductions
                for member, is_used in zip(reduction.group.members, used_anywhere[reduction.first :])
                if is_used
            }
            if self.records_received
            else set()
        )
        for reduction in self._order:
            self._wait(reduction)
            reduction.assign_gradients(used_anywhere[reduction.first : reduction.first + len(reduction.group.members)])
        self.started = 0
        if not self._order_is_final:
            self._fix_order()

    def reduce_up_to(self, number: int) -> None:
        """Reduce the groups up to ``number``, with zeros for gradients that this rank does not compute."""
        for reduction in self._order[self.started : self._position[number] + 1]:
            self._start(reduction)

    # Internals --------------------------------------------------------------------------------------------------------

    def _check(self, reduction: GroupReduction, number: int) -> None:
        member = reduction.group.members[number]
        if self._position[reduction.number] < self.started and number not in reduction.computed:
            raise UsageError(
                f"the gradient of {member.name} came when it had been reduced, in the order of the first step: "
                "let units run in one order, or make one unit of what changes places"
            )
        if number in reduction.computed:
            raise UsageError(
                f"parameter {member.name} got its gradient twice in one backward pass: "
                "use non-reentrant activation checkpointing (use_reentrant=False)"
            )
        assert member.unsharded.grad is not None
        if member.unsharded.grad.layout is not torch.strided:
            raise UsageError(f"parameter {member.name} got a sparse gradient: only dense ones can be reduced")

    def _open(self, reduction: GroupReduction) -> bool:
        """Allocate memory for a group; return False if a group that uses this memory is not yet being reduced."""
        position = self._position[reduction.number]
        before = self.buffers.groups_before(position)
        if before > self.started:
            return False
        for other in self._order[:before]:
            self._wait(other)
        reduction.open(self.buffers.buffer(position))
        return True

    def _reduce_complete(self) -> None:
        while self.started < len(self._order) and self._order[self.started].complete:
            self._start(self._order[self.started])
        if self.started:
            last = self._order[self.started - 1].handle
            if last is not None:
                last.done()  # drives all reductions for which the other ranks are ready

    def _fill(self, reduction: GroupReduction) -> None:
        """Complete a group: a gradient that this pass did not compute is an accumulated one, or zeros."""
        if reduction.flat is None:
            opened = self._open(reduction)
            assert opened, "all earlier groups have been started"
        for number in range(len(reduction.group.members)):
            if number not in reduction.computed or number in reduction.uncopied:
                reduction.copy_in(number, self._scale)
        reduction.uncopied.clear()

    def _start(self, reduction: GroupReduction) -> None:
        """Enqueue the reduction of a group whose gradients have all been computed."""
        if reduction.flat is None or reduction.uncopied or not reduction.complete:
            self._fill(reduction)
        flat, target = reduction.flat, reduction.allocate_target()
        assert flat is not None
        if self._observer is not None:
            self._observer.before_reduction(reduction.number)

        def reduce() -> Work | None:
            work = self._reduce_scatter(reduction.group, target, flat)
            if self._replicas is not None and self._stream.asynchronous:
                self._replicas.all_reduce(target, "sum")
            if (work is None or work.done()) and (self._replicas is None or self._stream.asynchronous):
                reduction.after_reduce()
            return work

        reduction.handle = self._stream.run(reduce)
        self.started += 1

    def _reduce_scatter(self, group: ParamGroup, target: Tensor, flat: Tensor) -> Work | None:
        """Start to reduce a group's gradients into this rank's slice; on a single rank this is the whole group."""
        if not group.single_rank:
            work = self._comm.reduce_scatter(target, flat, "sum", async_op=True)
            return None if isinstance(work, Tensor) else work
        if target is not flat:
            target.copy_(flat)
        return None

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


# Buffer pools for unsharded gradients, in the order in which groups are reduced; sizes are in bytes ------------------


class RingPool:
    """Ring buffer in shared memory of the node, which the groups use one after another.

    A group has the same offset on every rank, whenever a rank computes its gradients. The
    constructor is collective.
    """

    def __init__(self, comm: Communicator, capacity: int) -> None:
        self.memory = comm.empty(capacity, torch.uint8)
        self.set_sizes([])

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the order of the groups."""
        self._sizes, self._slots = sizes, ring_slots(sizes, self.memory.numel())

    def groups_before(self, number: int) -> int:
        """Return the number of groups up to the last one whose slot overlaps the slot of this group."""
        return self._slots[number].after

    def buffer(self, number: int) -> Tensor:
        """Return the slot of a group."""
        offset = self._slots[number].offset
        return self.memory[offset : offset + self._sizes[number]]


class FreshPool:
    """Pool on a device that allocates a buffer per group at its first gradient, at most ``limit`` at the same time."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit = device, limit
        self.set_sizes([])

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the order of the groups."""
        self._sizes = sizes

    def groups_before(self, number: int) -> int:
        """Return the number of groups that must be reduced so that at most ``limit`` are in memory."""
        return max(number + 1 - self._limit, 0)

    def buffer(self, number: int) -> Tensor:
        """Allocate memory for a group."""
        return torch.empty(self._sizes[number], dtype=torch.uint8, device=self._device)


BufferPool = RingPool | FreshPool
