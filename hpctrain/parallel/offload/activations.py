"""Keep on the host what recomputed units need from the forward pass until their backward pass.

Note: there and back. A unit that computes its activations again keeps no more than what it was given. That goes down
while the next units compute, and its memory on the device is free. When the backward pass asks for it, it comes up
again, and with it what the unit before was given, which will be asked for next. Memory of the host is used again: a
copy down waits until the last copy up from the same place has been made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.parallel.offload.memory import HostMemory
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.offload.transfer import Arrival, Transfer
from hpctrain.parallel.recompute import keep_inputs
from hpctrain.transport.streams import streams_of


def offload_activations(
    units: Iterable[nn.Module], settings: OffloadSettings, device: torch.device, rank: int
) -> Activations:
    """Let recomputing modules keep what they were given in the host's memory, not on the device."""
    memory = HostMemory(replace(settings, disk=""), device, rank)
    activations = Activations(Transfer(streams_of(device)), Buffers(memory.empty), device)
    for unit in units:
        keep_inputs(unit, activations.keeping)
    return activations


class Buffers:
    """Lend memory of the host, and take it back; ``room`` gives more."""

    def __init__(self, room: Callable[[int, torch.dtype], Tensor]) -> None:
        self._room = room
        self._free: dict[int, list[tuple[Tensor, Arrival | None]]] = {}

    def lend(self, nbytes: int) -> tuple[Tensor, Arrival | None]:
        """Return memory, and the copy that may still read from it."""
        free = self._free.get(nbytes)
        return free.pop() if free else (self._room(nbytes, torch.uint8), None)

    def take_back(self, buffer: Tensor, read_by: Arrival | None) -> None:
        """Take memory back from which no more copies will be begun."""
        self._free.setdefault(buffer.numel(), []).append((buffer, read_by))


class _Given:
    """Hold what one call of a unit was given, in order, and know what the call before it was given."""

    def __init__(self, before: _Given | None) -> None:
        self._before = weakref.ref(before) if before is not None else lambda: None
        self._kept: list[weakref.ref[_Kept]] = []

    def add(self, kept: _Kept) -> None:
        """Take note of one tensor."""
        self._kept.append(weakref.ref(kept))

    def fetch(self, *, before: bool) -> None:
        """Let all of it come up, and then what the call ``before`` was given."""
        for kept in [reference() for reference in self._kept]:
            if kept is not None:
                kept.fetch()
        earlier = self._before()
        if before and earlier is not None:
            earlier.fetch(before=False)


class _Kept:
    """Be one tensor, in the host's memory."""

    def __init__(self, tensor: Tensor, given: _Given, transfer: Transfer, buffers: Buffers) -> None:
        self.given = given
        self._transfer, self._buffers = transfer, buffers
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._buffer, self._arrival = buffers.lend(tensor.nbytes)
        if self._arrival is not None:
            transfer.down_after(self._arrival)
        flat = tensor.detach().view(-1)
        self._down = transfer.down(self._buffer.view(self._dtype), flat)
        transfer.keep(flat)
        self._fetched: Tensor | None = None
        self._taken = False

    def fetch(self) -> None:
        """Begin to copy it up, unless that has been done, or was done for somebody before."""
        if self._fetched is None and not self._taken:
            self._fetched = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            source = self._buffer.view(self._dtype)
            self._arrival = self._transfer.up(self._fetched.view(-1), source, after=self._down)
            self._transfer.keep(self._fetched)

    def take(self) -> Tensor:
        """Return the tensor; who asks again gets another copy."""
        self._taken = False
        self.given.fetch(before=True)
        self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None and self._arrival is not None
        self._arrival.join()
        self._taken = True
        return found

    def __del__(self) -> None:
        self._buffers.take_back(self._buffer, self._arrival)


class Activations:
    """Keep what units are given on the host, from their forward to their backward pass."""

    def __init__(self, transfer: Transfer, buffers: Buffers, device: torch.device) -> None:
        self._transfer, self._buffers, self._device = transfer, buffers, device
        self._last: weakref.ref[_Given] | None = None

    def keeping(self) -> AbstractContextManager[object]:
        """Return a context in which what autograd saves, for one call of a unit, goes to the host."""
        given = _Given(self._last() if self._last is not None else None)
        self._last = weakref.ref(given)

        def pack(tensor: Tensor) -> Tensor | _Kept:
            if not self._moves(tensor):
                return tensor
            kept = _Kept(tensor, given, self._transfer, self._buffers)
            given.add(kept)
            return kept

        return saved_tensors_hooks(pack, _unpack)

    def _moves(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the device's, and neither a parameter nor in an order of its own."""
        here = tensor.device.type == self._device.type and tensor.layout is torch.strided
        return here and tensor.numel() > 0 and tensor.is_contiguous() and not (tensor.is_leaf and tensor.requires_grad)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.take()
