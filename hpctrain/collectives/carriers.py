"""Dispatch of a communicator's tensors to the host collectives or to the collectives of this rank's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.collectives.choice.table import Table
from hpctrain.collectives.host import HostCollectives
from hpctrain.collectives.hosted import HostedCollectives
from hpctrain.errors import CommunicationError
from hpctrain.transport.base import Transport

if TYPE_CHECKING:
    from hpctrain.collectives.device import DeviceCollectives
    from hpctrain.transport.canary import Verdict


class Carriers:
    """Collectives of host tensors, and those of GPU tensors once ``use_device`` has created them."""

    def __init__(self, transport: Transport, host: HostCollectives) -> None:
        self._transport = transport
        self._host = host
        self.hosted = HostedCollectives(host)
        self.device: DeviceCollectives | None = None
        self.place: tuple[torch.device, Verdict | None] | None = None

    def of(self, tensor: Tensor) -> HostedCollectives | DeviceCollectives:
        """Return the collectives that serve a tensor."""
        if tensor.device.type not in ("cpu", "cuda"):
            raise CommunicationError(f"cannot send a tensor on {tensor.device}: allowed are tensors on cpu and cuda")
        return self.hosted if self.device is None or tensor.device.type == "cpu" else self.device

    def use_device(
        self, device: torch.device, verdict: Verdict | None, parent: Carriers | None, table: Table | None
    ) -> None:
        """Set up the collectives of GPU tensors (see ``Communicator.use_device``). Collective.

        ``table`` holds the measured choice of paths for this device, if there is one.
        """
        from hpctrain.collectives.device import DeviceCollectives, maker, paths_of
        from hpctrain.collectives.queue import OperationQueue
        from hpctrain.transport.canary import library_name
        from hpctrain.transport.device import believe, gather_abilities

        found = verdict.cuda_aware if verdict is not None and verdict.holds_for(library_name()) else None
        abilities = gather_abilities(self._transport, device, believe(found))
        queue = self.hosted.queue = OperationQueue(None if parent is None else parent.hosted.queue)
        self.device = DeviceCollectives(
            self._transport,
            self._host,
            device,
            abilities,
            maker(self._transport, device),
            queue=queue,
            measured=paths_of(table),
        )
        self.place = device, verdict

    def free(self) -> None:
        """Free the transports of the device. Collective."""
        if self.device is not None:
            self.device.free()
