"""Dispatch of a communicator's tensors to the host collectives or to the collectives of this rank's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.host_collectives import FlatHostCollectives, HostCollectives
from hpctrain.comm.transport.base import Transport
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.device.collectives import DeviceCollectives
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult


# Collectives on host tensors, by the algorithm that the caller names or by the fastest applicable one -----------------


# Collectives of any tensors in host memory; tensors with other strides or on other devices are copied -----------------


# Dispatch of a communicator's tensors to the host collectives or to the collectives of this rank's device -------------


class Dispatch:
    """Collectives of host tensors, and those of GPU tensors once ``use_device`` has created them."""

    def __init__(self, transport: Transport, host: HostCollectives) -> None:
        self._transport = transport
        self._host = host
        self.hosted = FlatHostCollectives(host)
        self.device: DeviceCollectives | None = None
        self.place: tuple[torch.device, ProbeResult | None] | None = None

    def of(self, tensor: Tensor) -> FlatHostCollectives | DeviceCollectives:
        """Return the collectives that serve a tensor."""
        if tensor.device.type not in ("cpu", "cuda"):
            raise CommunicationError(f"cannot send a tensor on {tensor.device}: allowed are tensors on cpu and cuda")
        return self.hosted if self.device is None or tensor.device.type == "cpu" else self.device

    def use_device(
        self, device: torch.device, verdict: ProbeResult | None, parent: Dispatch | None, table: AlgorithmTable | None
    ) -> None:
        """Set up the collectives of GPU tensors (see ``Communicator.use_device``). Collective.

        ``table`` holds the measured choice of paths for this device, if there is one.
        """
        from hpctrain.comm.device.collectives import DeviceCollectives, maker, paths_of
        from hpctrain.comm.device.cuda_aware_probe import library_name
        from hpctrain.comm.device.paths import believe, gather_abilities
        from hpctrain.comm.ordering import OperationQueue

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
