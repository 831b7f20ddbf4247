"""Interface to the streams and events of a device.

Note: the order of work. A *stream* executes its work in order, and a stream can wait for an *event*
of another; the host only enqueues work. A carrier with its own stream is ordered in both directions
by two events. Its stream waits for the work on the caller's stream, and later the caller's stream
waits for the carrier's results. The host waits only in ``synchronize``. Tests substitute a recorder
with the same interface and check the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.comm.transport.waiting import waiting


class Streams(Protocol):
    """Streams of one device; stream and event objects are opaque to the caller."""

    device: torch.device

    def current(self) -> Any:
        """Return the stream on which the caller computes."""

    def new(self) -> Any:
        """Return a new stream."""

    def handle(self, stream: Any) -> int:
        """Return a stream as a handle for C libraries."""

    def record(self, stream: Any) -> Any:
        """Return an event that occurs when all work enqueued on the stream so far has completed."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event, without blocking the host."""

    def done(self, event: Any) -> bool:
        """Return whether an event has occurred."""

    def synchronize(self, event: Any) -> None:
        """Block the host until an event has occurred."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy between device and pinned memory, as work of a stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Prevent reuse of a tensor's memory before the stream's enqueued work has completed."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return host memory that the device can access by DMA."""

    def entered(self) -> Any:
        """Return a context in which the device is current for C libraries."""

    def on(self, stream: Any) -> Any:
        """Return a context in which computations are enqueued on a stream."""


class CudaStreams:
    """Streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> torch.cuda.Stream:
        """Return torch's current stream of the device."""
        return torch.cuda.current_stream(self.device)

    def new(self) -> torch.cuda.Stream:
        """Return a high-priority stream: communication must not queue behind computation."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def handle(self, stream: torch.cuda.Stream) -> int:
        """Return the ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event after the enqueued work of the stream; without a time stamp, which is cheapest."""
        event = torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make the stream wait for the event."""
        stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        """Return whether the event has occurred."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block until the event; the wait is visible to a watchdog like one for a message, which it may well be."""
        with waiting("device"):
            event.synchronize()

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy as work of the stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Record for torch's allocator that the stream uses the tensor."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which the device is the current one of the CUDA runtime."""
        with torch.cuda.device(self.device):
            yield

    def on(self, stream: torch.cuda.Stream) -> Any:
        """Return a context in which the stream is torch's current one."""
        return torch.cuda.stream(stream)


class HostStreams:
    """Streams of the host itself, or of the meta device, where all work is executed immediately."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self.device = device

    def current(self) -> None:
        """Return None: the only order is that of the program."""

    def new(self) -> None:
        """Return None."""

    def handle(self, stream: None) -> int:
        """Return the default stream."""
        return 0

    def record(self, stream: None) -> None:
        """Return None: all requested work has completed."""

    def wait(self, stream: None, event: None) -> None:
        """Return immediately."""

    def done(self, event: None) -> bool:
        """Return True."""
        return True

    def synchronize(self, event: None) -> None:
        """Return immediately."""

    def copy(self, target: Tensor, source: Tensor, stream: None) -> None:
        """Copy immediately."""
        target.copy_(source)

    def keep(self, tensor: Tensor, stream: None) -> None:
        """Do nothing: referenced memory is not reused."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context without effect."""
        yield

    def on(self, stream: None) -> Any:
        """Return a context without effect."""
        return nullcontext()


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    if device.type == "cuda":
        return CudaStreams(device)
    return HostStreams(device) if device.type == "meta" else HostStreams()
