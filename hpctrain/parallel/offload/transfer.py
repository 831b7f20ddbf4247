"""Transfer between the host and the device: of parameters, which the host updates, and of activations.

Note: two orders. The source of a copy must have been computed, so the stream of the copy waits for
the stream of the caller. A reader of the target waits for the copy: the device by ``wait``, which
does not block the host, and the host by ``synchronize``. Copies in one direction run one after
another. On a CPU a copy is complete when the call returns, and waiting has no effect. Tests
substitute a device whose copies complete as late as possible.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.parallel.fsdp.param_group import ParamGroup
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.offload.memory import HostMemory
from hpctrain.parallel.recompute import set_save_context

PAUSE = 5e-5  # seconds between two polls of a copy


@dataclass(frozen=True)
class CopyHandle:
    """Handle of a copy in progress."""

    streams: Streams
    event: Any

    def wait(self) -> None:
        """Order subsequent work on the current stream after the copy."""
        self.streams.wait(self.streams.current(), self.event)

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""
        self.streams.synchronize(self.event)

    def poll(self) -> None:
        """Block like ``synchronize``, but from any thread: ``synchronize`` records a wait of the computing thread."""
        while not self.streams.done(self.event):
            time.sleep(PAUSE)


class Transfer:
    """Copies to the host (down) and to the device (up); on a GPU they are asynchronous only with pinned host memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._host_stream, self._device_stream = streams.new(), streams.new()

    def to_host(self, target: Tensor, source: Tensor) -> CopyHandle:
        """Copy ``source`` to the host after the work that is already enqueued on the current stream."""
        return self._copy(target, source, self._host_stream)

    def to_device(self, target: Tensor, source: Tensor, after: CopyHandle | None = None) -> CopyHandle:
        """Copy to the device, after enqueued work of the current stream on ``target``, and ``after`` another copy."""
        if after is not None:
            self.streams.wait(self._device_stream, after.event)
        return self._copy(target, source, self._device_stream)

    def host_copies_after(self, copy_handle: CopyHandle) -> None:
        """Make later copies to the host wait for a copy to the device whose source they overwrite."""
        self.streams.wait(self._host_stream, copy_handle.event)

    def record_use(self, tensor: Tensor) -> None:
        """Keep device memory, which its owner may release at any time, until its copies are complete."""
        self.streams.keep(tensor, self._host_stream)
        self.streams.keep(tensor, self._device_stream)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> CopyHandle:
        self.streams.wait(stream, self.streams.record(self.streams.current()))
        self.streams.copy(target, source, stream)
        return CopyHandle(self.streams, self.streams.record(stream))


# Master weights -------------------------------------------------------------------------------------------------------
#
# Note: where copies of a master are stored. Unsharded parameters that stay on the device contain the
# rank's slice; it is refreshed there after an update. Units that are unsharded on demand are gathered
# from a slice that stays on the device, or, if parameters are offloaded too, from the host each time.
# The transferred data has the compute dtype. If that is not the master's dtype, or if a master is
# updated while it is read (``delayed``), the host keeps a ``mirror`` as the source of transfers.


class MasterWeights:
    """Transfer of one group (``HostWeights``): into ``resident`` device memory, or in each pass if that is None."""

    def __init__(self, group: ParamGroup, transfer: Transfer, mirror: Tensor | None, resident: Tensor | None) -> None:
        self.mirror = mirror
        self._group, self._transfer, self._resident = group, transfer, resident
        self._stale = True  # the mirror and the device copy differ from the host's master
        self._copy_handle: CopyHandle | None = None  # of the last copy to the device
        self._started = False

    @property
    def is_resident(self) -> bool:
        """Return whether the device keeps this rank's slice in the compute dtype."""
        return self._resident is not None

    @property
    def is_copy_source(self) -> bool:
        """Return whether transfers read the master itself."""
        return self._resident is None and self.mirror is None

    def mark_stale(self) -> None:
        """Mark the host's master as changed."""
        self._stale = True

    def wait_for_reads(self) -> None:
        """Wait until no copy reads the host memory of this group."""
        if self._copy_handle is not None:
            self._copy_handle.poll()

    def update_copies(self, *, mirror_written: bool = False) -> None:
        """Refresh the copy on the device, and the mirror unless the update has written it (``mirror_written``)."""
        if self.mirror is not None and (self._stale or not mirror_written):
            self.wait_for_reads()
            self.mirror.copy_(self._group.shard_data)
        if self._resident is not None:
            self._copy_handle = self._transfer.to_device(self._resident, self._source)
        self._stale = False

    @property
    def _source(self) -> Tensor:
        return self._group.shard_data if self.mirror is None else self.mirror

    def start_copy(self) -> None:
        """Start the transfer of a slice that does not stay on the device; it overlaps with computation."""
        if self._stale:
            self.update_copies()
        if self._resident is None:
            self._copy_handle, self._started = self._transfer.to_device(self._group.flat_slice, self._source), True

    def finish_copy(self) -> None:
        """Order subsequent work after the arrival of the slice in the flat tensor."""
        if self._stale or self._resident is None and not self._started:
            self.start_copy()
        self._started = False
        if self._copy_handle is not None:
            self._copy_handle.wait()
        if self._resident is not None and self._resident is not self._group.flat_slice:
            self._group.flat_slice.copy_(self._resident)


# Activation offload: inputs of recomputed units live in host memory between their forward and backward passes ---------
#
# Note: the path of an activation. A unit that recomputes its activations keeps only its inputs. They
# are copied to the host while the next units compute, and their device memory is freed. When the
# backward pass requests them, they are copied back. The inputs of the previous unit, which is next in
# the backward pass, are prefetched with them. Host buffers are reused: a copy to the host waits for
# the last copy from the same buffer to the device.


def offload_activations(
    units: Iterable[nn.Module], settings: OffloadSettings, device: torch.device, rank: int
) -> Activations:
    """Keep the inputs of recomputed units in host memory instead of device memory."""
    memory = HostMemory(replace(settings, disk=""), device, rank)
    activations = Activations(Transfer(streams_of(device)), Buffers(memory.empty), device)
    for unit in units:
        set_save_context(unit, activations.save_context)
    return activations


class Buffers:
    """Pool of host buffers; ``allocate`` allocates new ones."""

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[tuple[Tensor, CopyHandle | None]]] = {}

    def take(self, nbytes: int) -> tuple[Tensor, CopyHandle | None]:
        """Return a buffer, and the copy that may still read from it."""
        free = self._free.get(nbytes)
        return free.pop() if free else (self._allocate(nbytes, torch.uint8), None)

    def give_back(self, buffer: Tensor, read_by: CopyHandle | None) -> None:
        """Return a buffer to the pool; the caller starts no more copies from it."""
        self._free.setdefault(buffer.numel(), []).append((buffer, read_by))


class _CallTensors:
    """Saved tensors of one call of a unit, in order, with a reference to those of the previous call."""

    def __init__(self, previous: _CallTensors | None) -> None:
        self._previous = weakref.ref(previous) if previous is not None else lambda: None
        self.tensors: list[weakref.ref[_SavedTensor]] = []

    def fetch(self, *, previous: bool) -> None:
        """Start copying all tensors to the device; with ``previous``, then also those of the previous call."""
        for saved in [reference() for reference in self.tensors]:
            if saved is not None:
                saved.fetch()
        earlier = self._previous()
        if previous and earlier is not None:
            earlier.fetch(previous=False)


class _SavedTensor:
    """One saved tensor, in host memory."""

    def __init__(self, tensor: Tensor, call: _CallTensors, transfer: Transfer, buffers: Buffers) -> None:
        self.call = call
        self._transfer, self._buffers = transfer, buffers
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._buffer, self._copy_to_device = buffers.take(tensor.nbytes)
        if self._copy_to_device is not None:
            transfer.host_copies_after(self._copy_to_device)
        flat = tensor.detach().view(-1)
        self._copy_to_host = transfer.to_host(self._buffer.view(self._dtype), flat)
        transfer.record_use(flat)
        self._fetched: Tensor | None = None
        self._taken = False

    def fetch(self) -> None:
        """Start the copy to the device, unless it was started or the tensor was already taken."""
        if self._fetched is None and not self._taken:
            self._fetched = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            source = self._buffer.view(self._dtype)
            self._copy_to_device = self._transfer.to_device(self._fetched.view(-1), source, after=self._copy_to_host)
            self._transfer.record_use(self._fetched)

    def take(self) -> Tensor:
        """Return the tensor on the device. Each further call returns another copy."""
        self._taken = False
        self.call.fetch(previous=True)
        self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None and self._copy_to_device is not None
        self._copy_to_device.wait()
        self._taken = True
        return found

    def __del__(self) -> None:
        self._buffers.give_back(self._buffer, self._copy_to_device)


class Activations:
    """Offload of the inputs of units to the host, between their forward and backward passes."""

    def __init__(self, transfer: Transfer, buffers: Buffers, device: torch.device) -> None:
        self._transfer, self._buffers, self._device = transfer, buffers, device
        self._last: weakref.ref[_CallTensors] | None = None

    def save_context(self) -> AbstractContextManager[object]:
        """Return a context that copies the tensors that autograd saves, during one call of a unit, to the host."""
        call = _CallTensors(self._last() if self._last is not None else None)
        self._last = weakref.ref(call)

        def pack(tensor: Tensor) -> Tensor | _SavedTensor:
            if not self._is_offloaded(tensor):
                return tensor
            saved = _SavedTensor(tensor, call, self._transfer, self._buffers)
            call.tensors.append(weakref.ref(saved))
            return saved

        return saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved.take())

    def _is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is to be offloaded: it is contiguous, on the device, and not a parameter."""
        on_device = tensor.device.type == self._device.type and tensor.layout is torch.strided
        return (
            on_device
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and not (tensor.is_leaf and tensor.requires_grad)
        )
