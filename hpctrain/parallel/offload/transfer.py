"""Copies between device and host that overlap with computation, on one stream per direction.

Note: two orders. The source of a copy must have been computed, so the stream of the copy waits for
the stream of the caller. A reader of the target waits for the copy: the device by ``join``, which
does not block the host, and the host by ``wait``. Copies in one direction run one after another. On
a CPU a copy is complete when the call returns, and waiting has no effect. Tests substitute a device
whose copies complete as late as possible.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpctrain.transport.streams import Streams

PAUSE = 5e-5  # seconds between two polls of a copy


@dataclass(frozen=True)
class Arrival:
    """Handle of a copy in progress."""

    streams: Streams
    event: Any

    def join(self) -> None:
        """Order subsequent work on the current stream after the copy."""
        self.streams.wait(self.streams.current(), self.event)

    def wait(self) -> None:
        """Block the host until the copy is complete."""
        self.streams.synchronize(self.event)

    def poll(self) -> None:
        """Wait like ``wait``, but from any thread: ``wait`` records a wait of the computing thread."""
        while not self.streams.done(self.event):
            time.sleep(PAUSE)


class Transfer:
    """Copies to the host (down) and to the device (up); on a GPU they are asynchronous only with pinned host memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._down, self._up = streams.new(), streams.new()

    def down(self, target: Tensor, source: Tensor) -> Arrival:
        """Copy ``source`` to the host after the work that is already enqueued on the current stream."""
        return self._copy(target, source, self._down)

    def up(self, target: Tensor, source: Tensor, after: Arrival | None = None) -> Arrival:
        """Copy to the device, after enqueued work of the current stream on ``target``, and ``after`` another copy."""
        if after is not None:
            self.streams.wait(self._up, after.event)
        return self._copy(target, source, self._up)

    def down_after(self, arrival: Arrival) -> None:
        """Make later copies to the host wait for a copy to the device whose source they overwrite."""
        self.streams.wait(self._down, arrival.event)

    def keep(self, tensor: Tensor) -> None:
        """Keep device memory, which its owner may release at any time, until its copies are complete."""
        self.streams.keep(tensor, self._down)
        self.streams.keep(tensor, self._up)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> Arrival:
        self.streams.wait(stream, self.streams.record(self.streams.current()))
        self.streams.copy(target, source, stream)
        return Arrival(self.streams, self.streams.record(stream))
