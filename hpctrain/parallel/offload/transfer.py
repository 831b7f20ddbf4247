"""Copy between the device and the host beside what the device computes: a stream for each direction.

Note: two orders. What a copy reads must have been computed, so its stream waits for the stream of the caller; and who
reads what it has written waits in turn: the device by ``join``, which costs the host nothing, the host by ``wait``.
Copies of one direction are done one after the other. On a CPU a copy has been made when it is asked for, and nobody
waits; tests put a device there that is as late as it may be.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpctrain.transport.streams import Streams

PAUSE = 5e-5  # seconds between two looks at a copy


@dataclass(frozen=True)
class Arrival:
    """Be a copy under way."""

    streams: Streams
    event: Any

    def join(self) -> None:
        """Let what the device does next on the current stream come after the copy."""
        self.streams.wait(self.streams.current(), self.event)

    def wait(self) -> None:
        """Wait here until the copy has been made."""
        self.streams.synchronize(self.event)

    def poll(self) -> None:
        """Wait as ``wait`` does, in any thread: what is noted of waiting is the thread's that computes."""
        while not self.streams.done(self.event):
            time.sleep(PAUSE)


class Transfer:
    """Copy down to the host and up to the device; host memory has to be pinned for a GPU to do so by itself."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._down, self._up = streams.new(), streams.new()

    def down(self, target: Tensor, source: Tensor) -> Arrival:
        """Copy to the host what the current stream has computed into ``source`` by now."""
        return self._copy(target, source, self._down)

    def up(self, target: Tensor, source: Tensor, after: Arrival | None = None) -> Arrival:
        """Copy to the device, once the current stream is done with what ``target`` holds, ``after`` another copy."""
        if after is not None:
            self.streams.wait(self._up, after.event)
        return self._copy(target, source, self._up)

    def down_after(self, arrival: Arrival) -> None:
        """Let the next copies down wait for a copy up, whose source they overwrite."""
        self.streams.wait(self._down, arrival.event)

    def keep(self, tensor: Tensor) -> None:
        """Keep memory of the device, which its owner may let go any time, until it has been copied."""
        self.streams.keep(tensor, self._down)
        self.streams.keep(tensor, self._up)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> Arrival:
        self.streams.wait(stream, self.streams.record(self.streams.current()))
        self.streams.copy(target, source, stream)
        return Arrival(self.streams, self.streams.record(stream))
