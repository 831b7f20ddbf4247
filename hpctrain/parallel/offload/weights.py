"""Transfer of parameters between the host, which stores and updates them, and the device that computes with them.

Note: two orders. The source of a copy must have been computed, so the stream of the copy waits for
the stream of the caller. A reader of the target waits for the copy: the device by ``wait``, which
does not block the host, and the host by ``synchronize``. Copies in one direction run one after another. On
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
class CopyHandle:
    """Handle of a copy in progress."""

    streams: Streams
    event: Any

    def wait(self) -> None:
        """Order subsequent work on the current stream after the copy."""
        self.streams.wait(self.streams.current(), self.event)

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""
        self.streams.synchronize(self.event)

    def poll(self) -> None:
        """Block like ``synchronize``, but from any thread: ``synchronize`` records a wait of the computing thread."""
        while not self.streams.done(self.event):
            time.sleep(PAUSE)


class Transfer:
    """Copies to the host (down) and to the device (up); on a GPU they are asynchronous only with pinned host memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._host_stream, self._device_stream = streams.new(), streams.new()

    def to_host(self, target: Tensor, source: Tensor) -> CopyHandle:
        """Copy ``source`` to the host after the work that is already enqueued on the current stream."""
        return self._copy(target, source, self._host_stream)

    def to_device(self, target: Tensor, source: Tensor, after: CopyHandle | None = None) -> CopyHandle:
        """Copy to the device, after enqueued work of the current stream on ``target``, and ``after`` another copy."""
        if after is not None:
            self.streams.wait(self._device_stream, after.event)
        return self._copy(target, source, self._device_stream)

    def host_copies_after(self, copy_handle: CopyHandle) -> None:
        """Make later copies to the host wait for a copy to the device whose source they overwrite."""
        self.streams.wait(self._host_stream, copy_handle.event)

    def record_use(self, tensor: Tensor) -> None:
        """Keep device memory, which its owner may release at any time, until its copies are complete."""
        self.streams.keep(tensor, self._host_stream)
        self.streams.keep(tensor, self._device_stream)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> CopyHandle:
        self.streams.wait(stream, self.streams.record(self.streams.current()))
        self.streams.copy(target, source, stream)
        return CopyHandle(self.streams, self.streams.record(stream))


# Transfer of parameters from the host, which stores and updates them, to the device that computes with them -----------
#
# Note: where copies of a master are stored. Unsharded parameters that stay on the device contain the
# rank's slice; it is refreshed there after an update. Units that are unsharded on demand are gathered
# from a slice that stays on the device, or, if parameters are offloaded too, from the host each time.
# The transferred data has the compute dtype. If that is not the master's dtype, or if a master is
# updated while it is read (``delayed``), the host keeps a ``mirror`` as the source of transfers.


class MasterWeights:
    """Transfer of one group (``HostWeights``): into ``resident`` device memory, or in each pass if that is None."""

    def __init__(self, group: ParamGroup, transfer: Transfer, mirror: Tensor | None, resident: Tensor | None) -> None:
        self.mirror = mirror
        self._group, self._transfer, self._resident = group, transfer, resident
        self._stale = True  # the mirror and the device copy differ from the host's master
        self._copy_handle: CopyHandle | None = None  # of the last copy to the device
        self._started = False

    @property
    def is_resident(self) -> bool:
        """Return whether the device keeps this rank's slice in the compute dtype."""
        return self._resident is not None

    @property
    def is_copy_source(self) -> bool:
        """Return whether transfers read the master itself."""
        return self._resident is None and self.mirror is None

    def mark_stale(self) -> None:
        """Mark the host's master as changed."""
        self._stale = True

    def wait_for_reads(self) -> None:
        """Wait until no copy reads the host memory of this group."""
        if self._copy_handle is not None:
            self._copy_handle.poll()

    def update_copies(self, *, mirror_written: bool = False) -> None:
        """Refresh the copy on the device, and the mirror unless the update has written it (``mirror_written``)."""
        if self.mirror is not None and (self._stale or not mirror_written):
            self.wait_for_reads()
            self.mirror.copy_(self._group.shard_data)
        if self._resident is not None:
            self._copy_handle = self._transfer.to_device(self._resident, self._source)
        self._stale = False

    @property
    def _source(self) -> Tensor:
        return self._group.shard_data if self.mirror is None else self.mirror

    def start_copy(self) -> None:
        """Start the transfer of a slice that does not stay on the device; it overlaps with computation."""
        if self._stale:
            self.update_copies()
        if self._resident is None:
            self._copy_handle, self._started = self._transfer.to_device(self._group.flat_slice, self._source), True

    def finish_copy(self) -> None:
        """Order subsequent work after the arrival of the slice in the flat tensor."""
        if self._stale or self._resident is None and not self._started:
            self.start_copy()
        self._started = False
        if self._copy_handle is not None:
            self._copy_handle.wait()
        if self._resident is not None and self._resident is not self._group.flat_slice:
            self._group.flat_slice.copy_(self._resident)
