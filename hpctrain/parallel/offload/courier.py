"""Bring parameters from the host, where they are kept and updated, to the device that computes with them.

Note: where copies of a master lie. Whole parameters that stay on the device hold the rank's slice in its place: it is
renewed there after an update. Units that pass by are gathered from a slice that stays on the device, or, where
parameters are offloaded too, come from the host each time. What travels is of the dtype that computes: where that is
not the master's, or where a master is updated while it is read (``delayed``), the host keeps a ``mirror`` to send from.
"""

from __future__ import annotations

from torch import Tensor

from hpctrain.parallel.fsdp.piece import Piece
from hpctrain.parallel.offload.transfer import Arrival, Transfer


class MasterCourier:
    """Bring one piece up (a ``Courier``): to where it ``stays`` on the device, or each time if it stays nowhere."""

    def __init__(self, piece: Piece, transfer: Transfer, mirror: Tensor | None, stays: Tensor | None) -> None:
        self.mirror = mirror
        self._piece, self._transfer, self._stays = piece, transfer, stays
        self._stale = True  # the mirror, and what stays, are not what the host has
        self._arrival: Arrival | None = None  # of the last copy up
        self._begun = False

    @property
    def resides(self) -> bool:
        """Tell whether the device keeps this rank's slice in the dtype that computes."""
        return self._stays is not None

    @property
    def is_read(self) -> bool:
        """Tell whether passes read the master itself."""
        return self._stays is None and self.mirror is None

    def mark(self) -> None:
        """Take note that the host's master has been changed."""
        self._stale = True

    def quiet(self) -> None:
        """Wait until nothing reads the host's memory of this piece any more."""
        if self._arrival is not None:
            self._arrival.poll()

    def renew(self, *, mirrored: bool = False) -> None:
        """Send the master up where it stays on the device; the update has written the mirror if it is ``mirrored``."""
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
        """Begin to bring up what only passes by, beside what the device computes."""
        if self._stale:
            self.renew()
        if self._stays is None:
            self._arrival, self._begun = self._transfer.up(self._piece.place, self._source), True

    def deliver(self) -> None:
        """Order what is done next behind the piece's arrival in its place."""
        if self._stale or self._stays is None and not self._begun:
            self.start()
        self._begun = False
        if self._arrival is not None:
            self._arrival.join()
        if self._stays is not None and self._stays is not self._piece.place:
            self._piece.place.copy_(self._stays)
