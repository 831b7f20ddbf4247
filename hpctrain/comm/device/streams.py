"""Interface to the streams and events of a device.

Note: the order of work. A *stream* executes its work in order, and a stream can wait for an *event*
of another; the host only enqueues work. A carrier with its own stream is ordered in both directions
by two events. Its stream waits for the work on the caller's stream, and later the caller's stream
waits for the carrier's results. The host waits only in ``synchronize``. Tests substitute a recorder
with the same interface and check the order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.transport.base import Work
from hpctrain.comm.transport.waiting import waiting


class Streams:
    """Streams of one device; stream and event objects are opaque to the caller.

    Those of this class are of the host itself, or of the meta device: all work is executed
    immediately, and the only order is that of the program.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self.device = device

    def current(self) -> Any:
        """Return the stream on which the caller computes."""

    def new(self) -> Any:
        """Return a new stream."""

    def handle(self, stream: Any) -> int:
        """Return a stream as a handle for C libraries."""
        return 0

    def record(self, stream: Any) -> Any:
        """Return an event that occurs when all work enqueued on the stream so far has completed."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event, without blocking the host."""

    def done(self, event: Any) -> bool:
        """Return whether an event has occurred."""
        return True

    def synchronize(self, event: Any) -> None:
        """Block the host until an event has occurred."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy between device and pinned memory, as work of a stream."""
        target.copy_(source)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Prevent reuse of a tensor's memory before the stream's enqueued work has completed."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return host memory that the device can access by DMA."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def entered(self) -> Any:
        """Return a context in which the device is current for C libraries."""
        return nullcontext()

    def on(self, stream: Any) -> Any:
        """Return a context in which computations are enqueued on a stream."""
        return nullcontext()


class CudaStreams(Streams):
    """Streams of one GPU."""

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new(self) -> torch.cuda.Stream:
        """Return a high-priority stream: communication must not queue behind computation."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def handle(self, stream: torch.cuda.Stream) -> int:
        """Return the ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event without a time stamp, which is cheapest."""
        event = torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block until the event; the wait is visible to a watchdog like one for a message, which it may well be."""
        with waiting("device"):
            event.synchronize()

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Record for torch's allocator that the stream uses the tensor."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def entered(self) -> Any:
        return torch.cuda.device(self.device)

    def on(self, stream: torch.cuda.Stream) -> Any:
        return torch.cuda.stream(stream)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    if device.type == "cuda":
        return CudaStreams(device)
    return Streams(device) if device.type == "meta" else Streams()


# Communication stream -------------------------------------------------------------------------------------------------
#
# Note: a separate stream for communication. On a GPU, collectives run on a stream next to the
# computing stream. A collective first waits on this stream for the computations that were enqueued
# before it (an event). If its result is needed, the computing stream waits for the collective
# (another event). The host waits for neither. On a CPU, a collective is complete when it returns, or,
# in memory that the node shares, still in progress. Then each call of its handle drives its progress.


class StreamWork:
    """Handle of one collective that was enqueued on a ``CommStream``."""

    def __init__(self, streams: Streams, event: Any, work: Work | None) -> None:
        self._streams, self._event, self._work = streams, event, work

    def done(self) -> bool:
        """Return whether the operation is complete for this host, and drive its progress if it is not."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Order subsequent computations after the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._event is not None:
            self._streams.wait(self._streams.current(), self._event)


class CommStream:
    """Communication stream, which runs collectives in the order in which they are enqueued."""

    def __init__(self, streams: Streams) -> None:
        # the host can enqueue a collective before the previous one is complete
        self.asynchronous = streams.device.type != "cpu"
        self._streams, self._stream = streams, streams.new()

    def run(self, collective: Callable[[], Work | None]) -> StreamWork:
        """Enqueue a collective, and return its handle."""
        streams = self._streams
        if not self.asynchronous:
            return StreamWork(streams, None, collective())
        streams.wait(self._stream, streams.record(streams.current()))
        with streams.on(self._stream):
            work = collective()
        return StreamWork(streams, streams.record(self._stream), work)
