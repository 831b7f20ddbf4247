"""MPI with device pointers: the suite on memory that MPI accepts, and the synchronization before MPI may read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.streams import LazyStreams
from suites.transports import TransportSuite
from support.reductions import values

from hpctrain.comm.device.cuda_mpi import CudaMpiTransport
from hpctrain.comm.transport.base import Transport

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[16 * 2**20, 64], ids=["whole", "cut"])
def transport(comm: Any, request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Return a transport of all ranks whose device is the host."""
    transport = CudaMpiTransport(comm.transport.comm, torch.device("cpu"), message_bytes=request.param)
    yield transport
    transport.free()


class TestCudaMpiTransport(TransportSuite):
    pass


@pytest.mark.parametrize("operation", ["broadcast", "all_reduce", "send", "all_gather", "all_to_all"])
def test_mpi_reads_after_the_device_has_computed(comm: Any, operation: str) -> None:
    streams, size, me = LazyStreams(), comm.size, comm.rank
    transport = CudaMpiTransport(comm.transport.comm, torch.device("cpu"), streams)
    tensor, out = torch.full((size,), -1, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    gathered = torch.empty(size * size, dtype=torch.int64)
    streams.enqueue(streams.caller, lambda: tensor.copy_(values(me, size, torch.int64)))
    every = torch.stack([values(rank, size, torch.int64) for rank in range(size)])
    if operation in ("all_gather", "all_to_all"):
        # Here torch copies this rank's own share immediately; a device would do it in stream order.
        streams.finish()

    def send() -> None:
        arriving = transport.irecv(out, (me - 1) % size)
        transport.send(tensor, (me + 1) % size)
        arriving.wait()

    calls: dict[str, tuple[Callable[[], object], torch.Tensor, torch.Tensor]] = {
        "broadcast": (lambda: transport.broadcast(tensor, size - 1), tensor, every[-1]),
        "all_reduce": (lambda: transport.all_reduce(tensor, "sum"), tensor, every.sum(0)),
        "send": (send, out, every[(me - 1) % size]),
        "all_gather": (lambda: transport.all_gather(gathered, tensor), gathered, every.view(-1)),
        "all_to_all": (lambda: transport.all_to_all(out, tensor, [1] * size, [1] * size), out, every[:, me]),
    }
    call, found, wanted = calls[operation]
    call()
    assert torch.equal(found, wanted) and any("host waits" in text for text in streams.log)
    transport.free()
