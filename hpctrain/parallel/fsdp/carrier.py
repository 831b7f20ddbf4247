"""Communication stream: collectives of parameter groups that overlap with computation, if the device supports it.

Note: a separate stream for communication. On a GPU, collectives run on a stream next to the
computing stream. A collective first waits on this stream for the computations that were enqueued
before it (an event). If its result is needed, the computing stream waits for the collective
(another event). The host waits for neither. On a CPU, a collective is complete when it returns, or,
in memory that the node shares, still in progress. Then each call of its handle drives its progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.transport.base import Work
from hpctrain.transport.streams import Streams


class Ticket:
    """Handle of one collective that was enqueued on a ``Lane``."""

    def __init__(self, lane: Lane, event: Any, work: Work | None) -> None:
        self._lane, self._event, self._work = lane, event, work

    def done(self) -> bool:
        """Return whether the operation is complete for this host, and drive its progress if it is not."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Order subsequent computations after the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._lane.join(self._event)


class Lane:
    """Communication stream, which runs collectives in the order in which they are enqueued."""

    def __init__(self, streams: Streams) -> None:
        # the host can enqueue a collective before the previous one is complete
        self.beside = streams.device.type != "cpu"
        self._streams = streams
        self._stream = streams.new()

    def run(self, collective: Callable[[], Work | None]) -> Ticket:
        """Enqueue a collective, and return its handle."""
        streams = self._streams
        streams.wait(self._stream, streams.record(streams.current()))
        with streams.on(self._stream):
            work = collective()
        return Ticket(self, streams.record(self._stream), work)

    def join(self, event: Any) -> None:
        """Make the computing stream wait for an event of the communication stream."""
        self._streams.wait(self._streams.current(), event)
