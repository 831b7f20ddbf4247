"""Tensors on a GPU: passed to the device's collectives, in order with the host's; here the GPU is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.dispatch import Dispatch
from hpctrain.errors import CommunicationError

pytestmark = pytest.mark.ranks
HOST = torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Return a set of addresses: tensors at them count as tensors on a GPU."""
    addresses: set[int] = set()

    def of(dispatch: Dispatch, tensor: torch.Tensor) -> Any:
        return dispatch.device if tensor.data_ptr() in addresses and dispatch.device else dispatch.host

    monkeypatch.setattr(Dispatch, "of", of)
    yield addresses


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    part = comm.split(0)
    part.use_device(HOST)
    yield part
    part.free()


def placed(addresses: set[int], tensor: torch.Tensor) -> torch.Tensor:
    addresses.add(tensor.data_ptr())
    return tensor


def test_every_operation_is_passed_to_the_device(own: Any, on_gpu: set[int]) -> None:
    size, rank = own.size, own.rank
    total = size * (size + 1) / 2
    one = placed(on_gpu, torch.full((6,), rank + 1.0))
    before = own._dispatch.host.queue.number
    assert own.all_reduce(one).eq(total).all()
    work = own.all_reduce(one.fill_(1), async_op=True)
    work.wait()
    assert work.done() and one.eq(size).all()
    assert own.broadcast(one.fill_(rank), size - 1).eq(size - 1).all()
    assert own.reduce(one.fill_(rank + 1.0), "sum", 0).eq(total if rank == 0 else rank + 1).all()
    whole, share = placed(on_gpu, torch.arange(2.0 * size)), placed(on_gpu, torch.empty(2))
    assert own.reduce_scatter(share, whole).tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    work = own.reduce_scatter(share.zero_(), whole, async_op=True)
    assert work.done() and share.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    assert own.all_gather(whole, share.fill_(rank)).view(size, 2)[:, 0].tolist() == list(range(size))
    gathered = own.gather(whole if rank == 0 else None, share, 0)
    assert (gathered is whole) == (rank == 0)
    assert own.scatter(share, whole if rank == 0 else None, 0).eq(rank).all()
    swapped = own.all_to_all(placed(on_gpu, torch.empty(size)), placed(on_gpu, torch.full((size,), float(rank))))
    assert swapped.tolist() == list(range(size))
    assert own._dispatch.host.queue.number - before == 10


def test_point_to_point_messages_are_passed_to_the_device(own: Any, on_gpu: set[int]) -> None:
    mine, theirs = placed(on_gpu, torch.full((3,), float(own.rank))), placed(on_gpu, torch.empty(3))
    right, left = (own.rank + 1) % own.size, (own.rank - 1) % own.size
    if own.rank % 2 == 0 and right != 0:
        own.send(mine, right, tag=2)
    elif own.rank % 2:
        assert own.recv(theirs, left, tag=2).eq(left).all()
    arriving = own.irecv(torch.empty(3), left)  # on the host
    own.isend(mine.clone(), right).wait()
    arriving.wait()


def test_split_communicators_share_the_order_of_operations(own: Any) -> None:
    part = own.split(own.rank % 2)
    if part.size > 1:
        assert part._dispatch.device is not None
        assert part._dispatch.host.queue._order is own._dispatch.host.queue._order
    part.free()


def test_an_algorithm_unsupported_on_the_device_names_the_supported_ones(own: Any, on_gpu: set[int]) -> None:
    tensor = placed(on_gpu, torch.zeros(2))
    with pytest.raises(CommunicationError, match="algorithm nccl cannot do all_reduce on the GPU: .*; able are staged"):
        own.all_reduce(tensor, algorithm="nccl")
    with pytest.raises(CommunicationError, match="ring is not for tensors on a GPU: auto, nccl, mpi, staged are"):
        own.all_reduce(tensor, algorithm="ring")


def test_a_canary_verdict_on_another_mpi_does_not_count(comm: Any) -> None:
    part = comm.split(0)
    part.use_device(HOST, ProbeResult(True, "it worked", "Some MPI 1.0"))
    assert "no canary exchange" in part._dispatch.device._capabilities.no_mpi
    part.free()
