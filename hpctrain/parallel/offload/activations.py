"""Activation offload: inputs of recomputed units live in host memory between their forward and backward passes.

Note: the path of an activation. A unit that recomputes its activations keeps only its inputs. They
are copied to the host while the next units compute, and their device memory is freed. When the
backward pass requests them, they are copied back. The inputs of the previous unit, which is next in
the backward pass, are prefetched with them. Host buffers are reused: a copy to the host waits for
the last copy from the same buffer to the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.comm.device.streams import streams_of
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.offload.memory import HostMemory
from hpctrain.parallel.offload.weights import CopyHandle, Transfer
from hpctrain.parallel.recompute import set_save_context


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
        self._tensors: list[weakref.ref[_SavedTensor]] = []

    def add(self, saved: _SavedTensor) -> None:
        """Add one saved tensor."""
        self._tensors.append(weakref.ref(saved))

    def fetch(self, *, previous: bool) -> None:
        """Start copying all tensors to the device; with ``previous``, then also those of the previous call."""
        for saved in [reference() for reference in self._tensors]:
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
            call.add(saved)
            return saved

        return saved_tensors_hooks(pack, _unpack)

    def _is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is to be offloaded: it is contiguous, on the device, and not a parameter."""
        on_device = tensor.device.type == self._device.type and tensor.layout is torch.strided
        return (
            on_device
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and not (tensor.is_leaf and tensor.requires_grad)
        )


def _unpack(saved: Tensor | _SavedTensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.take()
