"""MPI transport: the suite with whole messages and with segmented ones, and point-to-point messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from suites.transports import TransportSuite
from support.reductions import same_bits, values

from hpctrain.comm.transport.base import Transport
from hpctrain.errors import CommunicationError

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[16 * 2**20, 64], ids=["whole", "cut"])
def transport(comm: Any, request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Return a transport of all ranks that cuts messages above a given number of bytes."""
    from hpctrain.comm.transport.mpi import MpiTransport

    transport = MpiTransport(comm.transport.comm, request.param, request.param)
    yield transport
    transport.free()


class TestMpiTransport(TransportSuite):
    pass


@pytest.mark.parametrize("numel", [0, 1, 16, 17, 1000])
def test_messages_are_sent_around_a_ring(transport: Transport, numel: int) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    tensor, arrived = values(transport.rank, numel, torch.float32), torch.full((numel,), -1.0)
    if transport.rank == 0:
        transport.send(tensor, right, tag=5)
        transport.recv(arrived, left, tag=5)
    else:
        transport.recv(arrived, left, tag=5)
        transport.send(tensor, right, tag=5)
    assert same_bits(arrived, values(left, numel, torch.float32))


def test_messages_in_flight_are_matched_by_tag(transport: Transport) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    arrived = [torch.empty(40, dtype=torch.bfloat16) for _ in range(3)]
    works = [transport.irecv(tensor, left, tag) for tag, tensor in enumerate(arrived)]
    for tag in (2, 0, 1):
        works.append(transport.isend(values(transport.rank, 40, torch.bfloat16, seed=tag), right, tag))
    while not all(work.done() for work in works):
        pass
    for work in reversed(works):
        work.wait()
    for tag, tensor in enumerate(arrived):
        assert same_bits(tensor, values(left, 40, torch.bfloat16, seed=tag))


def test_messages_in_flight_do_not_interfere_with_an_all_to_all(transport: Transport) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message, arrived = values(transport.rank, 1, torch.int64), torch.empty(1, dtype=torch.int64)
    work = transport.isend(message, right)
    out, ones = torch.empty(transport.size, dtype=torch.int64), [1] * transport.size
    transport.all_to_all(out, torch.full((transport.size,), transport.rank), ones, ones)
    transport.recv(arrived, left)
    work.wait()
    assert out.tolist() == list(range(transport.size))
    assert same_bits(arrived, values(left, 1, torch.int64))


def test_recorder_counts_messages(transport: Transport) -> None:
    with transport.recording() as recorder:
        if transport.rank == 0:
            transport.send(torch.zeros(100, dtype=torch.float16), 1)
        elif transport.rank == 1:
            transport.recv(torch.empty(100, dtype=torch.float16), 0)
    expected = {0: {"send": 200}, 1: {"recv": 200}}.get(transport.rank, {})
    assert recorder.bytes == expected and recorder.calls == dict.fromkeys(expected, 1)


@pytest.mark.parametrize(
    "dtype, op",
    [
        (torch.bfloat16, "sum"),
        (torch.float16, "product"),
        (torch.bool, "sum"),
        (torch.int8, "sum"),
        (torch.uint8, "max"),
        (torch.int16, "product"),
        (torch.float32, "average"),
        (torch.float32, "max"),
        (torch.float64, "min"),
    ],
)
def test_refuses_reductions_that_mpi_computes_differently_from_torch(
    transport: Transport, dtype: torch.dtype, op: str
) -> None:
    assert not transport.reduces(dtype, op)
    with pytest.raises(CommunicationError, match=f"MPI does not reduce {dtype} by {op}; use algorithm direct or auto"):
        transport.all_reduce(torch.zeros(2, dtype=dtype), op)


def test_a_given_communicator_is_not_freed(comm: Any) -> None:
    from mpi4py import MPI

    from hpctrain.comm.transport.mpi import MpiTransport

    given = MPI.COMM_WORLD.Dup()
    transport = MpiTransport(given)
    assert MPI.Comm.Compare(given, transport.comm) == MPI.CONGRUENT
    transport.free()
    given.Barrier()
    given.Free()
