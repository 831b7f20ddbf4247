"""Transfer of parameters from the host, which stores and updates them, to the device that computes with them.

Note: where copies of a master are stored. Unsharded parameters that stay on the device contain the
rank's slice; it is refreshed there after an update. Units that are unsharded on demand are gathered
from a slice that stays on the device, or, if parameters are offloaded too, from the host each time.
The transferred data has the compute dtype. If that is not the master's dtype, or if a master is
updated while it is read (``delayed``), the host keeps a ``mirror`` as the source of transfers.
"""

from __future__ import annotations

from torch import Tensor

from hpctrain.parallel.fsdp.piece import Piece
from hpctrain.parallel.offload.transfer import Arrival, Transfer


class MasterCourier:
    """Transfer (``Courier``) of one group: into ``stays``, which remains on the device, or per pass if that is None."""

    def __init__(self, piece: Piece, transfer: Transfer, mirror: Tensor | None, stays: Tensor | None) -> None:
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
