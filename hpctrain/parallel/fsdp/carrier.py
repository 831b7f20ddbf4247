"""Carry pieces between ranks beside the computation, where the device can do two things at once.

Note: a lane of one's own. On a GPU collectives run on a stream beside the one that computes. Work that is handed over
waits there for what was computed before (an event), and whoever needs its result lets the computing stream wait for it
(another event); the host waits for neither. On the host a collective is done when it returns, or, in memory that the
node shares, under way and carried on by whoever asks after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.transport.base import Work
from hpctrain.transport.streams import Streams


class Ticket:
    """Be one collective that was handed over."""

    def __init__(self, lane: Lane, event: Any, work: Work | None) -> None:
        self._lane, self._event, self._work = lane, event, work

    def done(self) -> bool:
        """Tell whether it is over for this host, and carry on what is under way."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Order what is computed next behind it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._lane.join(self._event)


class Lane:
    """Run collectives in the order in which they are handed over."""

    def __init__(self, streams: Streams) -> None:
        self.beside = streams.device.type != "cpu"  # the host need not wait for one collective to hand over the next
        self._streams = streams
        self._stream = streams.new()

    def run(self, collective: Callable[[], Work | None]) -> Ticket:
        """Hand a collective over."""
        streams = self._streams
        streams.wait(self._stream, streams.record(streams.current()))
        with streams.on(self._stream):
            work = collective()
        return Ticket(self, streams.record(self._stream), work)

    def join(self, event: Any) -> None:
        """Let the computing stream wait for an event of this lane."""
        self._streams.wait(self._streams.current(), event)
