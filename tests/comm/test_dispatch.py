"""Tensors on a GPU: passed to the device's collectives, in order with the host's; here the GPU is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.dispatch import Dispatch
from hpctrain.comm.prepared import FlatHostCollectives
from hpctrain.errors import CommunicationError

pytestmark = pytest.mark.ranks
HOST = torch.device("cpu")


class FakeGpu(Dispatch):
    """Dispatch that takes the tensors at some addresses for tensors on a GPU."""

    made: list[FakeGpu] = []
    addresses: set[int] = set()
    served = 0  # operations that the device served

    def __init__(self, flat: FlatHostCollectives) -> None:
        super().__init__(flat)
        self.made.append(self)

    def of(self, tensor: torch.Tensor) -> Any:
        if tensor.data_ptr() not in self.addresses or self.device is None:
            return self.host
        self.served += 1
        return self.device


class WithFakeGpu(Communicator):
    _dispatch_type = FakeGpu


@pytest.fixture
def own(comm: Any) -> Iterator[Communicator]:
    part = WithFakeGpu(comm.transport.split(0, comm.rank))
    part.use_device(HOST)
    yield part
    part.free()
    FakeGpu.made.clear()
    FakeGpu.addresses.clear()


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts as a tensor on the GPU."""
    FakeGpu.addresses.add(tensor.data_ptr())
    return tensor


def test_every_operation_is_passed_to_the_device(own: Communicator) -> None:
    size, rank = own.size, own.rank
    total = size * (size + 1) / 2
    one = placed(torch.full((6,), rank + 1.0))
    assert own.all_reduce(one).eq(total).all()
    work = own.all_reduce(one.fill_(1), async_op=True)
    work.wait()
    assert work.done() and one.eq(size).all()
    assert own.broadcast(one.fill_(rank), size - 1).eq(size - 1).all()
    assert own.reduce(one.fill_(rank + 1.0), "sum", 0).eq(total if rank == 0 else rank + 1).all()
    whole, share = placed(torch.arange(2.0 * size)), placed(torch.empty(2))
    assert own.reduce_scatter(share, whole).tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    work = own.reduce_scatter(share.zero_(), whole, async_op=True)
    assert work.done() and share.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    assert own.all_gather(whole, share.fill_(rank)).view(size, 2)[:, 0].tolist() == list(range(size))
    gathered = own.gather(whole if rank == 0 else None, share, 0)
    assert (gathered is whole) == (rank == 0)
    assert own.scatter(share, whole if rank == 0 else None, 0).eq(rank).all()
    swapped = own.all_to_all(placed(torch.empty(size)), placed(torch.full((size,), float(rank))))
    assert swapped.tolist() == list(range(size))
    assert FakeGpu.made[0].served == 10


def test_point_to_point_messages_are_passed_to_the_device(own: Communicator) -> None:
    mine, theirs = placed(torch.full((3,), float(own.rank))), placed(torch.empty(3))
    right, left = (own.rank + 1) % own.size, (own.rank - 1) % own.size
    if own.rank % 2 == 0 and right != 0:
        own.send(mine, right, tag=2)
    elif own.rank % 2:
        assert own.recv(theirs, left, tag=2).eq(left).all()
    arriving = own.irecv(torch.empty(3), left)  # on the host
    own.isend(mine.clone(), right).wait()
    arriving.wait()


def test_split_communicators_share_the_order_of_operations(own: Communicator) -> None:
    waited: list[str] = []
    work = SimpleNamespace(done=lambda: False, wait=lambda: waited.append("of the whole communicator"))
    part = own.split(0)
    whole_queue, part_queue = (made.host.queue for made in FakeGpu.made)
    assert whole_queue is not None and part_queue is not None
    with whole_queue("host"):
        whole_queue.register(work)
    with part_queue("nccl"):
        assert waited == ["of the whole communicator"]
    part.free()


def test_an_algorithm_unsupported_on_the_device_names_the_supported_ones(own: Communicator) -> None:
    tensor = placed(torch.zeros(2))
    with pytest.raises(CommunicationError, match="algorithm nccl cannot do all_reduce on the GPU: .*; able are staged"):
        own.all_reduce(tensor, algorithm="nccl")
    with pytest.raises(CommunicationError, match="ring is not for tensors on a GPU: auto, nccl, mpi, staged are"):
        own.all_reduce(tensor, algorithm="ring")


def test_a_canary_verdict_on_another_mpi_does_not_count(own: Communicator) -> None:
    own.use_device(HOST, ProbeResult(True, "it worked", "Some MPI 1.0"))
    device = FakeGpu.made[0].device
    assert device is not None and "no canary exchange" in device.capabilities.no_mpi
