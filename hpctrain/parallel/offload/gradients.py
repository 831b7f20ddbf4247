"""Gradient offload: reduced gradients are copied to the host and become the gradients of the shards there.

Note: deferred scaling. Clipping would read and write every gradient once more. The update reads the
gradients anyway. Therefore only the factor is recorded, with the tensors to which it applies. A
tensor that is read before the update is scaled at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.param_group import GroupReduction, Memory, ParamGroup, held_in
from hpctrain.parallel.offload.transfer import CopyHandle, Transfer


class Gradients:
    """Gradients of the shards ``offloaded``: stored as their ``grad``, or set aside during an optimizer's step."""

    def __init__(self) -> None:
        self.offloaded: set[nn.Parameter] = set()
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        self._in_update: dict[nn.Parameter, Tensor] = {}
        self._unscaled: dict[nn.Parameter, Tensor] = {}
        self._factor = 1.0

    def of(self, shard: nn.Parameter) -> Tensor | None:
        """Return the gradient of a shard, unscaled."""
        return self._set_aside.get(shard, shard.grad)

    def scale(self, shards: list[nn.Parameter], factor: Tensor) -> None:
        """Multiply the gradients of shards; those of offloaded shards are multiplied when they are used."""
        self.apply_scale()
        others = [shard.grad for shard in shards if shard not in self.offloaded and shard.grad is not None]
        if others:
            torch._foreach_mul_(others, factor.to(others[0].device))
        self._factor = float(factor)
        if self._factor != 1.0:
            found = {shard: self.of(shard) for shard in shards if shard in self.offloaded}
            self._unscaled = {shard: gradient for shard, gradient in found.items() if gradient is not None}

    def apply_scale(self, shards: Iterable[nn.Parameter] | None = None) -> None:
        """Apply pending factors now, to all gradients or to those of some shards."""
        for shard in list(self._unscaled) if shards is None else shards:
            gradient = self._unscaled.pop(shard, None)
            if gradient is not None and gradient is self._current(shard):
                gradient.mul_(self._factor)

    def factor(self, shard: nn.Parameter) -> float:
        """Return the factor by which the gradient of a shard is still to be multiplied."""
        pending = self._unscaled.get(shard)
        return self._factor if pending is not None and pending is self._current(shard) else 1.0

    def _current(self, shard: nn.Parameter) -> Tensor | None:
        return self._in_update.get(shard, self.of(shard))

    def move_to_device(self, shard: nn.Parameter, device: torch.device) -> None:
        """Remove a shard that has moved to the device, and move its gradient there."""
        self.apply_scale([shard])
        self.offloaded.discard(shard)
        if shard.grad is not None:
            shard.grad = shard.grad.to(device)

    def drop(self) -> None:
        """Drop the gradients that are set aside."""
        self._set_aside, self._unscaled = {}, {}

    # Around an update -------------------------------------------------------------------------------------------------

    def set_aside(self, held: set[nn.Parameter]) -> None:
        """Hide the gradients of offloaded shards that an optimizer holds."""
        self._set_aside = {}
        for shard in self.offloaded & held:
            if shard.grad is not None:
                self._set_aside[shard], shard.grad = shard.grad, None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that were set aside, except for shards that a closure has given new gradients since."""
        self._in_update = {shard: gradient for shard, gradient in self._set_aside.items() if shard.grad is None}
        self._set_aside = {}
        return dict(self._in_update)

    def forget(self) -> None:
        """Drop the references to the gradients that ``take`` returned; the caller owns them."""
        self._in_update, self._unscaled = {}, {}

    def restore(self) -> None:
        """Restore the ``grad`` of shards, which exists after a step of any optimizer."""
        for shard, gradient in self._in_update.items():
            if shard.grad is None:
                shard.grad = gradient
        self._in_update = {}


# Gradient offload: reduced gradients are copied to the host and become the gradients of the shards there --------------
#
# Note: two chunks in flight. A reduced slice is copied on the device to one of two small staging
# buffers, in the dtype of the shards, and from there to the host. If a buffer is still being copied
# to the host, its next use waits on the device. Thus the memory of the slice itself is free at once.
# At most two chunks occupy device memory, however slow the link to the host is.


STAGING_BUFFERS = 2


@dataclass(eq=False)
class _Buffer:
    """One of a few buffers that are used in turn, and what still uses it: a copy to the host, or an addition."""

    memory: Tensor
    copy: CopyHandle | None = None
    user: GradOffloadReduction | None = None


class GradOffload:
    """Offload of gradient slices to memory from ``host``, in chunks of ``nbytes``.

    Each slice has two buffers if ``double_buffered``. ``on_copy_started`` is called for each slice
    whose copy has started, ``before_adding`` before a slice is added to another.
    """

    def __init__(
        self,
        transfer: Transfer,
        host: Memory,
        device: torch.device,
        nbytes: int,
        *,
        double_buffered: bool,
        on_copy_started: Callable[[GradOffloadReduction], None],
        before_adding: Callable[[], None],
    ) -> None:
        self.host, self.double_buffered = host, double_buffered
        self.on_copy_started, self.before_adding = on_copy_started, before_adding
        self._transfer, self._device, self._nbytes = transfer, device, nbytes
        # On the device; and on the host, for slices to be added to others. The next one is first.
        self._staging, self._sums = deque[_Buffer](), deque[_Buffer]()
        self._largest = 0  # bytes per slice

    def make_reduction(self, group: ParamGroup, number: int, first: int, dtype: torch.dtype) -> GradOffloadReduction:
        """Return the reduction of a group's gradients."""
        reduction = GradOffloadReduction(group, number, first, dtype)
        reduction.grad_offload = self
        self._largest = max(self._largest, group.layout.slice_numel * group.shard_data.itemsize)
        return reduction

    def copy_to_host(self, target: Tensor, source: Tensor) -> CopyHandle:
        """Copy a slice to the host, in the dtype of ``target``.

        The memory of ``source`` may be reused by work that is enqueued on the current stream
        afterwards.
        """
        step, copy_handle = max(self._nbytes // target.itemsize, 1), None
        for begin in range(0, target.numel(), step):
            part = target[begin : begin + step]
            staging = self._next_staging()
            memory = staging.memory.view(target.dtype)[: part.numel()]
            memory.copy_(source[begin : begin + step])
            copy_handle = staging.copy = self._transfer.to_host(part, memory)
        assert copy_handle is not None, "no slice is empty"
        return copy_handle

    def _next_staging(self) -> _Buffer:
        """Return the next staging buffer; subsequent work waits until it is empty."""
        if not self._staging:
            size = -(-min(self._nbytes, self._largest) // 8) * 8
            for _ in range(STAGING_BUFFERS):
                self._staging.append(_Buffer(torch.empty(size, dtype=torch.uint8, device=self._device)))
        staging = self._staging[0]
        self._staging.rotate()
        if staging.copy is not None:
            staging.copy.wait()
        return staging

    def sum_buffer(self, reduction: GradOffloadReduction) -> Tensor:
        """Return host memory for a slice to be added to another; the previous user first completes its addition."""
        shard_data = reduction.group.shard_data
        while len(self._sums) < STAGING_BUFFERS:
            self._sums.append(_Buffer(torch.empty(0, dtype=torch.uint8)))
        buffer = self._sums[0]
        self._sums.rotate()
        if buffer.user is not None and buffer.user.is_adding:
            buffer.user.finish_sum()
        buffer.user = reduction
        if buffer.memory.numel() < shard_data.nbytes:
            buffer.memory = self.host(shard_data.nbytes, torch.uint8)
        return buffer.memory[: shard_data.nbytes].view(shard_data.dtype)


class GradOffloadReduction(GroupReduction):
    """Reduction of one group's gradients to the host; as in ``GroupReduction`` for a group that stays on the device."""

    grad_offload: GradOffload
    copy_handle: CopyHandle | None = None
    _other_buffer: Tensor | None = None
    _summand: Tensor | None = None  # a slice that is to be added to the gradients of the shards
    _device_slice: Tensor | None = None  # device memory of a slice, until the caller's stream has been joined

    @property
    def is_adding(self) -> bool:
        """Return whether a slice is to be added to existing gradients."""
        return self._summand is not None

    @property
    def _is_offloaded(self) -> bool:
        return self.group.host_weights is not None

    def allocate_target(self) -> Tensor:
        """Return device memory for this rank's slice; on a single rank, the unsharded gradients themselves."""
        if not self._is_offloaded:
            return super().allocate_target()
        self.copy_handle = None
        if self.group.comm.size == 1:
            assert self.flat is not None
            self.target = self.flat
        else:
            self.target = torch.empty(self.group.layout.slice_numel, dtype=self.dtype, device=self.group.device)
        return self.target

    def after_reduce(self) -> None:
        """Start copying the slice to the host, and release it."""
        if not self._is_offloaded or self.target is None:
            return
        source, self.target = self.target, None
        self._device_slice = source
        if any(member.shard.grad is not None and member.shard.numel() for member in self.group.members):
            self.grad_offload.before_adding()
            self._summand = self.grad_offload.sum_buffer(self)
            self.copy_handle = self.grad_offload.copy_to_host(self._summand, source)
        else:
            self.copy_handle = self.grad_offload.copy_to_host(self.slice, source)
            self.grad_offload.on_copy_started(self)

    def close(self) -> None:
        super().close()
        self._device_slice = None

    @property
    def slice(self) -> Tensor:
        """Return the host memory of this group's gradients."""
        if self._slice is None:
            self._slice = self.grad_offload.host(self.group.layout.slice_numel, self.group.shard_data.dtype)
        return self._slice

    def swap_buffers(self) -> None:
        """Switch to the other host buffer, if there are two: the current one is still being read."""
        if self.grad_offload.double_buffered:
            self._slice, self._other_buffer = self._other_buffer, self._slice

    def finish_sum(self) -> None:
        """Wait for the slice, and add it to existing gradients."""
        assert self.copy_handle is not None
        self.copy_handle.synchronize()
        if self._summand is None:
            return
        new, self._summand = self._summand, None
        for member in self.group.members:
            part = held_in(new, member.held, member.shape)
            if member.shard.grad is not None:
                member.shard.grad.add_(part)
            else:
                held_in(self.slice, member.held, member.shape).copy_(part)

    def assign_gradients(self, used: list[bool]) -> None:
        if not self._is_offloaded:
            super().assign_gradients(used)
            return
        self.finish_sum()
        for member, is_used in zip(self.group.members, used):
            if is_used and member.shard.grad is None:
                member.shard.grad = held_in(self.slice, member.held, member.shape)
        self.computed.clear()

    def stay_on_device(self) -> None:
        """Release the host memory; from now on gradients stay on the device."""
        self._slice = self._other_buffer = None
