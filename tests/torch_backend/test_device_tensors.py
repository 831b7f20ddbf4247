"""Tensors on a GPU by the paths of the communicator: tensors of the host pretend to be there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.torch_backend.group import HpctrainGroup

pytestmark = [pytest.mark.ranks(2)]
DEVICE = torch.device("cuda:0")
MINUTE = timedelta(minutes=1)


class OnDevice(Tensor):
    """Tensor of the host that says it is on a GPU."""

    is_cuda = True
    device = DEVICE


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


class DeviceCommunicator(Communicator):
    """Communicator that notes for which devices its paths are set up, and serves their tensors as those of the host."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.devices: list[torch.device] = []

    def use_device(self, device: torch.device, verdict: Any = None, parent: Any = None) -> None:
        self.devices.append(device)

    def all_reduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        assert not isinstance(tensor, OnDevice) or self.devices == [DEVICE]
        return super().all_reduce(tensor.as_subclass(Tensor), *arguments, **options)


@pytest.fixture
def communicator(comm: Any) -> DeviceCommunicator:
    from hpctrain.torch_backend.transport import PollingTransport

    return DeviceCommunicator(PollingTransport(comm.transport.comm))


@pytest.fixture
def group(communicator: DeviceCommunicator) -> Iterator[HpctrainGroup]:
    group = HpctrainGroup(communicator, dist.HashStore(), MINUTE, "devices")
    yield group
    group.shutdown()


def test_the_first_tensor_on_a_gpu_sets_up_its_paths(communicator: DeviceCommunicator, group: HpctrainGroup) -> None:
    plain = torch.ones(3)
    group.allreduce([plain]).wait()
    assert communicator.devices == []
    for expected in (2.0, 4.0):
        tensor = on_device(plain)
        work = group.allreduce([tensor], dist.AllreduceOptions())
        assert work.is_completed()  # it ran in this thread, whose streams order it
        assert plain.tolist() == [2 * expected] * 3 and communicator.devices == [DEVICE]
