"""Transfer of parameters between the host, which stores and updates them, and the device that computes with them.

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

from hpctrain.comm.device.streams import Streams
from hpctrain.parallel.fsdp.param_group import ParamGroup

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


# Transfer of parameters from the host, which stores and updates them, to the device that computes with them -----------
#
# Note: where copies of a master are stored. Unsharded parameters that stay on the device contain the
# rank's slice; it is refreshed there after an update. Units that are unsharded on demand are gathered
# from a slice that stays on the device, or, if parameters are offloaded too, from the host each time.
# The transferred data has the compute dtype. If that is not the master's dtype, or if a master is
# updated while it is read (``delayed``), the host keeps a ``mirror`` as the source of transfers.


class MasterWeights:
    """Transfer (``Courier``) of one group: into ``stays``, which remains on the device, or per pass if that is None."""

    def __init__(self, piece: ParamGroup, transfer: Transfer, mirror: Tensor | None, stays: Tensor | None) -> None:
        self.mirror = mirror
        self._piece, self._transfer, self._stays = piece, transfer, stays
        self._stale = True  # the mirror and the device copy differ from the host's master
        self._arrival: Arrival | None = None  # of the last copy to the device
        self._begun = False

    @property
    def resides(self) -> bool:
        """Return whether the device keeps this rank's slice in the compute dtype."""
        return self._stays is not None

    @property
    def is_read(self) -> bool:
        """Return whether transfers read the master itself."""
        return self._stays is None and self.mirror is None

    def mark(self) -> None:
        """Mark the host's master as changed."""
        self._stale = True

    def quiet(self) -> None:
        """Wait until no copy reads the host memory of this group."""
        if self._arrival is not None:
            self._arrival.poll()

    def renew(self, *, mirrored: bool = False) -> None:
        """Refresh the permanent copy on the device; with ``mirrored``, the update has already written the mirror."""
        if self.mirror is not None and (self._stale or not mirrored):
            self.quiet()
            self.mirror.copy_(self._piece.own)
        if self._stays is not None:
            self._arrival = self._transfer.up(self._stays, self._source)
        self._stale = False

    @property
    def _source(self) -> Tensor:
        return self._piece.own if self.mirror is None else self.mirror

    def start(self) -> None:
        """Start the transfer of a slice that does not stay on the device; it overlaps with computation."""
        if self._stale:
            self.renew()
        if self._stays is None:
            self._arrival, self._begun = self._transfer.up(self._piece.place, self._source), True

    def deliver(self) -> None:
        """Order subsequent work after the arrival of the slice in the flat tensor."""
        if self._stale or self._stays is None and not self._begun:
            self.start()
        self._begun = False
        if self._arrival is not None:
            self._arrival.join()
        if self._stays is not None and self._stays is not self._piece.place:
            self._piece.place.copy_(self._stays)
