"""Point-to-point channels between neighbouring chunks of a pipeline, in which microbatches arrive in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.shm.spsc_ring import RingHandle, SpscRing
from hpctrain.comm.transport.base import Work
from hpctrain.comm.transport.waiting import OVERSUBSCRIBED_SPINS, SPINS, timeout_seconds, until
from hpctrain.errors import UsageError
from hpctrain.parallel.objective import ONE_TENSOR, Slot, named_leaves
from hpctrain.parallel.pipeline.schedules import ActionKind, Schedule

_BLOCK = 64  # bytes: alignment of tensors for vector loads
_MISSING = object()
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class MessageFormat:
    """Message format: shape and dtype of each tensor, and the skeleton of what a layer returned."""

    specs: tuple[Spec, ...]
    structure: Any = ONE_TENSOR

    @classmethod
    def of(cls, tensors: Sequence[Tensor], structure: Any = ONE_TENSOR) -> MessageFormat:
        """Return the format of a message with these tensors."""
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), structure)

    def gradients(self) -> MessageFormat:
        """Return the format of the message back: a gradient for each floating-point tensor."""
        return MessageFormat(tuple(spec for spec in self.specs if spec[1].is_floating_point))

    @property
    def nbytes(self) -> int:
        """Return the bytes of a buffer that holds all tensors."""
        return self._offsets()[-1]

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors in a buffer of ``nbytes`` bytes."""
        offsets = self._offsets()
        return tuple(
            flat[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for offset, (shape, dtype) in zip(offsets, self.specs)
        )

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``UsageError`` if tensors do not have the agreed shapes and dtypes."""
        found = MessageFormat.of(tensors)
        if found.specs != self.specs:
            raise UsageError(
                f"a stage of the pipeline returned {found} after {self} for inputs of the same shape: "
                "shapes must follow from the shape of the inputs"
            )

    def check_structure(self, structure: Any, layer: str) -> None:
        """Raise ``UsageError`` if a layer returned another structure, or other values that are not tensors."""
        if structure == self.structure:
            return
        before, now = (dict(named_leaves(each, "output")) for each in (self.structure, structure))
        differing = (name for name in {**before, **now} if before.get(name, _MISSING) != now.get(name, _MISSING))
        name = next(differing, "output")
        is_now, was = (_described(each[name]) if name in each else "missing" for each in (now, before))
        raise UsageError(
            f"layer {layer}, after which the model is cut, returned another structure than before for inputs of "
            f"the same shape: {name} is {is_now} and was {was}; what is no tensor must follow from the shape of "
            "the inputs; make it a tensor, or an argument of the model that later layers name in their forward"
        )

    def __str__(self) -> str:
        described = (f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.specs)
        return ", ".join(described) or "nothing"

    def _offsets(self) -> list[int]:
        offsets = [0]
        for shape, dtype in self.specs:
            nbytes = prod(shape) * dtype.itemsize
            offsets.append(offsets[-1] + -(-nbytes // _BLOCK) * _BLOCK)
        return offsets


def _described(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Slot) else repr(leaf)


# Channels -------------------------------------------------------------------------------------------------------------
#
# Note: sending never blocks. If a sender finds no free slot, it queues its tensors and continues to
# compute. The queued tensors leave when this rank next waits (``ChannelSet.wait``). Only receiving
# blocks, so a valid schedule cannot deadlock for lack of slots, however few there are.


class SharedMemoryChannel:
    """Channel through memory that both ranks share: one rank writes once, the other reads in place."""

    def __init__(self, slots: SpscRing, message_format: MessageFormat) -> None:
        self._slots, self._format = slots, message_format
        self._queued: deque[Sequence[Tensor]] = deque()

    def begin(self, count: int) -> None:
        """Do nothing: no preparation is needed."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Write the next message into a slot, or queue it until one is free."""
        self._format.check(tensors)
        self._queued.append(tensors)
        self.progress()

    def progress(self) -> None:
        """Write queued messages while slots are free."""
        while self._queued and self._slots.has_free_slot():
            for view, tensor in zip(self._format.views(self._slots.next()), self._queued.popleft()):
                view.copy_(tensor)
            self._slots.fill()

    def sent(self) -> bool:
        """Return whether all sent messages have left this rank's memory."""
        return not self._queued

    def arrived(self) -> bool:
        """Return whether the next message has arrived."""
        return self._slots.ready()

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message, which has arrived, in its slot; it stays unchanged until it is released."""
        return self._format.views(self._slots.take())

    def release(self) -> None:
        """Release the slot of the oldest message."""
        self._slots.free()


class MessageChannel:
    """Channel by point-to-point messages; receives are posted before the messages arrive."""

    def __init__(self, comm: Communicator, peer: int, tag: int, message_format: MessageFormat, depth: int) -> None:
        self._comm, self._peer, self._tag, self._format = comm, peer, tag, message_format
        self._sending: deque[tuple[list[Work], Sequence[Tensor]]] = deque()
        self._free: deque[tuple[Tensor, ...]] = deque()  # buffers
        self._posted: deque[tuple[list[Work], tuple[Tensor, ...]]] = deque()
        self._in_use: deque[tuple[Tensor, ...]] = deque()
        self._depth, self._unposted = depth, 0

    def begin(self, count: int) -> None:
        """Post receives for ``count`` messages, as far as there are buffers."""
        if not self._free and not self._posted and not self._in_use:
            for _ in range(self._depth):
                flat = torch.empty(self._format.nbytes, dtype=torch.uint8)
                self._free.append(self._format.views(flat))
        self._unposted += count
        self._post()

    def _post(self) -> None:
        while self._unposted and self._free:
            buffers = self._free.popleft()
            works = [self._comm.irecv(buffer, self._peer, self._tag) for buffer in buffers]
            self._posted.append((works, buffers))
            self._unposted -= 1

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send the next message."""
        self._format.check(tensors)
        ready = [tensor.contiguous() for tensor in tensors]
        self._sending.append(([self._comm.isend(tensor, self._peer, self._tag) for tensor in ready], ready))

    def progress(self) -> None:
        """Release messages that have left."""
        while self._sending and all(work.done() for work in self._sending[0][0]):
            self._sending.popleft()

    def sent(self) -> bool:
        """Return whether all sent messages have left this rank's memory."""
        return not self._sending

    def arrived(self) -> bool:
        """Return whether the next message has arrived."""
        return all(work.done() for work in self._posted[0][0])

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message in its receive buffer."""
        works, buffers = self._posted.popleft()
        for work in works:
            work.wait()
        self._in_use.append(buffers)
        return buffers

    def release(self) -> None:
        """Reuse the buffer of the oldest message for a message to come."""
        self._free.append(self._in_use.popleft())
        self._post()


class StagedChannel:
    """Channel that stages through host memory to and from a device; works with any MPI, on any number of GPUs."""

    def __init__(self, channel: SharedMemoryChannel | MessageChannel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self.begin, self.progress = channel.begin, channel.progress
        self.sent, self.arrived = channel.sent, channel.arrived

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Copy the next message to the host and send it from there."""
        self._channel.send([tensor.to("cpu") for tensor in tensors])

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message on the device; its host buffer is released at once."""
        tensors = tuple(tensor.to(self._device, copy=True) for tensor in self._channel.take())
        self._channel.release()
        return tensors

    def release(self) -> None:
        """Do nothing: ``take`` returns copies."""


Channel = SharedMemoryChannel | MessageChannel | StagedChannel  # one end of a channel between two chunks


class ChannelSet:
    """This rank's ends of all channels, and waits that progress all of them."""

    def __init__(self, oversubscribed: bool = False) -> None:
        self._channels: list[Channel] = []
        self._spins = OVERSUBSCRIBED_SPINS if oversubscribed else SPINS

    def add(self, channel: Channel) -> Channel:
        """Add a channel and return it."""
        self._channels.append(channel)
        return channel

    def receive(self, channel: Channel, what: str) -> tuple[Tensor, ...]:
        """Wait for the next message of a channel and return it; ``what`` names it in errors."""
        self.wait(channel.arrived, what)
        return channel.take()

    def progress(self) -> None:
        """Send queued messages, without waiting."""
        for channel in self._channels:
            channel.progress()

    def finish(self) -> None:
        """Wait until all sent messages have left."""
        self.wait(lambda: all(channel.sent() for channel in self._channels), "send to another stage")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()`` and send queued messages meanwhile. Raises ``DeadlineError`` naming ``what``."""

        def is_ready() -> bool:
            self.progress()
            return ready()

        until(is_ready, what, lambda: f"{what}: not within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)", self._spins)


# Channels between the chunks of a pipeline for microbatches of one shape ----------------------------------------------


EXTRA_SLOTS = 1  # messages that may be ready beyond those that are needed at once
# Kinds of pass at which a chunk begins and stops to need a received message: for activations, and for
# gradients.
ACTIVATIONS = ({ActionKind.FORWARD}, {ActionKind.BACKWARD, ActionKind.WEIGHT})
GRADIENTS = ({ActionKind.BACKWARD, ActionKind.INPUT}, {ActionKind.BACKWARD, ActionKind.WEIGHT})


class ChunkChannels:
    """This rank's ends of all channels, per chunk. Collective over all ranks of the pipeline.

    ``message_formats[c]`` is the format of the messages from chunk c to chunk c + 1.
    """

    def __init__(
        self, comm: Communicator, schedule: Schedule, message_formats: Sequence[MessageFormat], device: torch.device
    ) -> None:
        self.message_formats = tuple(message_formats)
        self.channel_set = ChannelSet(oversubscribed=comm.oversubscribed)
        self.activations_in: dict[int, Channel] = {}
        self.activations_out: dict[int, Channel] = {}
        self.gradients_in: dict[int, Channel] = {}
        self.gradients_out: dict[int, Channel] = {}
        links = []  # chunks of sender and receiver, format, kinds of pass that need a message, the two ends
        for chunk, given in enumerate(message_formats):
            links.append((chunk, chunk + 1, given, ACTIVATIONS, self.activations_out, self.activations_in))
            if has_backward(schedule):
                back = given.gradients()
                links.append((chunk + 1, chunk, back, GRADIENTS, self.gradients_out, self.gradients_in))
        handles = [
            RingHandle(schedule.rank_of(source), schedule.rank_of(target), count, message_format.nbytes)
            for source, target, message_format, kinds, *_ in links
            for count in (peak_messages(schedule, target, *kinds) + EXTRA_SLOTS,)
        ]
        for tag, (handle, ring, link) in enumerate(zip(handles, comm.slots(handles), links)):
            source, target, message_format, _, out, into = link
            ends = ((handle.source, handle.target, out, source), (handle.target, handle.source, into, target))
            for rank, peer, side, chunk in ends:
                if rank == comm.rank:
                    channel = (
                        SharedMemoryChannel(ring, message_format)
                        if ring is not None
                        else MessageChannel(comm, peer, tag, message_format, handle.count)
                    )
                    end = channel if device.type == "cpu" else StagedChannel(channel, device)
                    side[chunk] = self.channel_set.add(end)

    def begin(self, microbatches: int) -> None:
        """Prepare for one step, in which every channel carries each microbatch once."""
        for channel in (*self.activations_in.values(), *self.gradients_in.values()):
            channel.begin(microbatches)


def has_backward(schedule: Schedule) -> bool:
    """Return whether a schedule has backward passes."""
    return any(action.kind is not ActionKind.FORWARD for action in schedule.actions[0])


def peak_messages(schedule: Schedule, chunk: int, first_kinds: set[ActionKind], last_kinds: set[ActionKind]) -> int:
    """Return the largest number of microbatches whose received message a chunk needs at once."""
    if not has_backward(schedule):
        return 1
    peak = current = 0
    for action in schedule.actions[schedule.rank_of(chunk)]:
        if action.chunk == chunk:
            current += action.kind in first_kinds
            peak = max(peak, current)
            current -= action.kind in last_kinds
    return peak
