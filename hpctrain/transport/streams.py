"""Order what a device does: streams and events behind one small face.

Note: who waits for whom. A *stream* does its work in order and a stream can wait for an *event* of another; the host
only hands out work. So a carrier with a stream of its own is ordered in both directions by two events: its stream waits
for what the caller's stream has computed, and later the caller's stream waits for what the carrier has brought. The
host waits in ``synchronize`` alone. Tests put a recorder behind the same face and read the order from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.transport.activity import waiting


class Streams(Protocol):
    """Hand out the streams of one device; what a stream or an event is, only the implementation knows."""

    device: torch.device

    def current(self) -> Any:
        """Return the stream that the caller computes on."""

    def new(self) -> Any:
        """Return another stream."""

    def handle(self, stream: Any) -> int:
        """Return a stream as C libraries take it."""

    def record(self, stream: Any) -> Any:
        """Return an event that comes when all work that was given to the stream is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event, without waiting here."""

    def done(self, event: Any) -> bool:
        """Tell whether an event has come."""

    def synchronize(self, event: Any) -> None:
        """Wait here for an event."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy between device and pinned memory, as work of a stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a tensor from being used again before the stream's present work is done."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return host memory that the device can copy from and to by itself."""

    def entered(self) -> Any:
        """Return a context in which C libraries find the device current."""

    def on(self, stream: Any) -> Any:
        """Return a context in which what is computed is work of a stream."""


class CudaStreams:
    """Be the streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> torch.cuda.Stream:
        """Return torch's current stream of the device."""
        return torch.cuda.current_stream(self.device)

    def new(self) -> torch.cuda.Stream:
        """Return a stream of high priority: what others wait for shall not queue behind computation."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def handle(self, stream: torch.cuda.Stream) -> int:
        """Return the ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event behind the present work of the stream; one without a time stamp costs least."""
        event = torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let the stream wait for the event."""
        stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        """Tell whether the event has come."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait here; a watchdog sees this as it sees a wait for a message, which it may well be."""
        with waiting("device"):
            event.synchronize()

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy as work of the stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that the stream uses the tensor."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device the current one of the CUDA runtime."""
        with torch.cuda.device(self.device):
            yield

    def on(self, stream: torch.cuda.Stream) -> Any:
        """Make the stream torch's current one."""
        return torch.cuda.stream(stream)


class HostStreams:
    """Be the streams of a device that does everything at once: the host itself."""

    device = torch.device("cpu")

    def current(self) -> None:
        """Return nothing: there is one order of work, that of the program."""

    def new(self) -> None:
        """Return nothing."""

    def handle(self, stream: None) -> int:
        """Return the default stream."""
        return 0

    def record(self, stream: None) -> None:
        """Return nothing: what was asked for is done already."""

    def wait(self, stream: None, event: None) -> None:
        """Return at once."""

    def done(self, event: None) -> bool:
        """Return True."""
        return True

    def synchronize(self, event: None) -> None:
        """Return at once."""

    def copy(self, target: Tensor, source: Tensor, stream: None) -> None:
        """Copy now."""
        target.copy_(source)

    def keep(self, tensor: Tensor, stream: None) -> None:
        """Do nothing: memory that is in use has a name."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def on(self, stream: None) -> Any:
        """Change nothing."""
        return nullcontext()


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
