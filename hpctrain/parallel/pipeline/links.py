"""Carry tensors from one chunk of a pipeline to its neighbour, in the order of the microbatches.

Note: nobody waits to send. A sender that finds no room keeps its tensors and goes on computing; what is kept leaves
when this rank next comes to wait for something (``Links.wait``). Only receiving waits, so a schedule that is sound
cannot hang for want of room, however few slots there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator
from hpctrain.collectives.node.slots import Slots
from hpctrain.parallel.pipeline.parcel import Parcel
from hpctrain.transport.activity import timeout_seconds
from hpctrain.transport.base import Work
from hpctrain.transport.patience import CROWDED_SPINS, SPINS, until


class Link(Protocol):
    """Be one end of a way from one chunk to another."""

    def begin(self, count: int) -> None:
        """Take note that so many messages are to come through."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the next message, or keep it until there is room."""

    def progress(self) -> None:
        """Send what is kept, as far as there is room."""

    def sent(self) -> bool:
        """Tell whether all that was sent has left this rank's memory."""

    def arrived(self) -> bool:
        """Tell whether the next message is here."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message, which has arrived; it stays as it is until it is released."""

    def release(self) -> None:
        """Give the memory of the oldest message back."""


class SlotLink:
    """Go through memory that both ranks share: written once by the one, read there by the other."""

    def __init__(self, slots: Slots, parcel: Parcel) -> None:
        self._slots, self._parcel = slots, parcel
        self._kept: deque[Sequence[Tensor]] = deque()

    def begin(self, count: int) -> None:
        """Do nothing: nothing has to be prepared."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Write the next message into a slot, or keep it until there is one."""
        self._parcel.check(tensors)
        self._kept.append(tensors)
        self.progress()

    def progress(self) -> None:
        """Write what is kept, as far as there is room."""
        while self._kept and self._slots.room():
            for view, tensor in zip(self._parcel.views(self._slots.next()), self._kept.popleft()):
                view.copy_(tensor)
            self._slots.fill()

    def sent(self) -> bool:
        """Tell whether all that was sent has left this rank's memory."""
        return not self._kept

    def arrived(self) -> bool:
        """Tell whether the next message is here."""
        return self._slots.ready()

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message where it lies."""
        return self._parcel.views(self._slots.take())

    def release(self) -> None:
        """Give the oldest message's slot back."""
        self._slots.free()


class MessageLink:
    """Go by messages; room for those that are to come is given to the transport before they do."""

    def __init__(self, comm: Communicator, peer: int, tag: int, parcel: Parcel, depth: int) -> None:
        self._comm, self._peer, self._tag, self._parcel = comm, peer, tag, parcel
        self._sending: deque[tuple[list[Work], Sequence[Tensor]]] = deque()
        self._free: deque[tuple[Tensor, ...]] = deque()  # buffers
        self._posted: deque[tuple[list[Work], tuple[Tensor, ...]]] = deque()
        self._taken: deque[tuple[Tensor, ...]] = deque()
        self._depth, self._due = depth, 0

    def begin(self, count: int) -> None:
        """Post receives for so many messages, as far as there are buffers for them."""
        if not self._free and not self._posted and not self._taken:
            for _ in range(self._depth):
                flat = torch.empty(self._parcel.nbytes, dtype=torch.uint8)
                self._free.append(self._parcel.views(flat))
        self._due += count
        self._post()

    def _post(self) -> None:
        while self._due and self._free:
            buffers = self._free.popleft()
            works = [self._comm.irecv(buffer, self._peer, self._tag) for buffer in buffers]
            self._posted.append((works, buffers))
            self._due -= 1

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send the next message."""
        self._parcel.check(tensors)
        ready = [tensor.contiguous() for tensor in tensors]
        self._sending.append(([self._comm.isend(tensor, self._peer, self._tag) for tensor in ready], ready))

    def progress(self) -> None:
        """Let go of messages that have left."""
        while self._sending and all(work.done() for work in self._sending[0][0]):
            self._sending.popleft()

    def sent(self) -> bool:
        """Tell whether all that was sent has left this rank's memory."""
        return not self._sending

    def arrived(self) -> bool:
        """Tell whether the next message is here."""
        return all(work.done() for work in self._posted[0][0])

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message in the buffer that it came to."""
        works, buffers = self._posted.popleft()
        for work in works:
            work.wait()
        self._taken.append(buffers)
        return buffers

    def release(self) -> None:
        """Use the oldest message's buffer for one that is to come."""
        self._free.append(self._taken.popleft())
        self._post()


class StagedLink:
    """Go through host memory to and from a device: what works with any MPI, on any number of GPUs."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link, self._device = link, device
        self.begin, self.progress, self.sent, self.arrived = link.begin, link.progress, link.sent, link.arrived

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Copy the next message to the host, and send it there."""
        self._link.send([tensor.to("cpu") for tensor in tensors])

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message on the device; its place on the host is free at once."""
        tensors = tuple(tensor.to(self._device, copy=True) for tensor in self._link.take())
        self._link.release()
        return tensors

    def release(self) -> None:
        """Do nothing: what was taken is a copy."""


class Links:
    """Hold this rank's ends of all links, and wait for all of them at once."""

    def __init__(self, crowded: bool = False) -> None:
        self._links: list[Link] = []
        self._spins = CROWDED_SPINS if crowded else SPINS

    def add(self, link: Link) -> Link:
        """Take care of one more."""
        self._links.append(link)
        return link

    def receive(self, link: Link, what: str) -> tuple[Tensor, ...]:
        """Wait for the next message of a link and return it; ``what`` says what is waited for."""
        self.wait(link.arrived, what)
        return link.take()

    def progress(self) -> None:
        """Send on what is kept, without waiting."""
        for link in self._links:
            link.progress()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self.wait(lambda: all(link.sent() for link in self._links), "send to another stage")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``, and send on meanwhile; ``DeadlineError`` says what was waited for."""

        def look() -> bool:
            self.progress()
            return ready()

        until(look, what, lambda: f"{what}: not within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)", self._spins)
