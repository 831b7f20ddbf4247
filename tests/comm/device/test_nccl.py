"""NCCL transport, over a fake that has the calls of ``cupy.cuda.nccl`` and implements them by MPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes.streams import LazyStreams
from suites.transports import TensorTransportSuite, everyone
from support.nccl import FakeNccl
from support.reductions import expected, same_bits, values

from hpctrain.comm.device.nccl import NcclTransport, check_own_gpus
from hpctrain.comm.device.streams import Streams
from hpctrain.errors import CommunicationError, DeviceError

NATIVE = (torch.int64, torch.int32, torch.int8, torch.uint8)
HOST = torch.device("cpu")


@pytest.fixture
def library() -> FakeNccl:
    return FakeNccl()


@pytest.fixture(params=[2**30, 64], ids=["whole", "cut"])
def transport(comm: Any, library: FakeNccl, request: pytest.FixtureRequest) -> Iterator[NcclTransport]:
    """Return a transport of all ranks that cuts calls above a given number of bytes."""
    transport = NcclTransport(comm.transport, HOST, streams=Streams(), library=library, piece_bytes=request.param)
    yield transport
    transport.free()


@pytest.mark.ranks
class TestNcclTransport(TensorTransportSuite):
    pass


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_whole_numbers_are_reduced_exactly(transport: NcclTransport, dtype: torch.dtype, op: str) -> None:
    tensor = values(transport.rank, 100, dtype)
    transport.all_reduce(tensor, op)
    assert same_bits(tensor, expected(everyone(transport), 100, dtype, op))


@pytest.mark.ranks
@pytest.mark.parametrize("numel", [0, 1, 16, 17, 100])
def test_reduce(transport: NcclTransport, numel: int) -> None:
    own = values(transport.rank, numel, torch.float64)
    total = expected(everyone(transport), numel, torch.float64, "sum")
    for root in range(transport.size):
        tensor = own.clone()
        transport.prepared_reduce(tensor, "sum", root)()
        assert same_bits(tensor, total if transport.rank == root else own)


@pytest.mark.ranks
def test_average_is_native_if_nccl_supports_it(comm: Any, transport: NcclTransport, library: FakeNccl) -> None:
    tensor = values(transport.rank, 10, torch.float32)
    transport.all_reduce(tensor, "average")
    torch.testing.assert_close(tensor, expected(everyone(transport), 10, torch.float32, "average"))
    library.version = 20900
    old = NcclTransport(comm.transport, HOST, streams=Streams(), library=library)
    assert transport.reduces(torch.float32, "average") and not old.reduces(torch.float32, "average")
    old.free()


@pytest.mark.ranks
@pytest.mark.parametrize("op, together", [("sum", any), ("max", any), ("min", all), ("product", all)])
def test_booleans_are_reduced_as_in_torch(transport: NcclTransport, op: str, together: Any) -> None:
    said = [[rank == 0, rank > 0, True, False] for rank in range(transport.size)]
    tensor = torch.tensor(said[transport.rank])
    transport.all_reduce(tensor, op)
    assert tensor.tolist() == [together(column) for column in zip(*said)]
    assert set(tensor.view(torch.uint8).tolist()) <= {0, 1}


@pytest.mark.ranks
def test_ranks_that_all_send_first_do_not_deadlock(transport: NcclTransport, library: FakeNccl) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    out = torch.empty(5)
    outgoing = transport.isend(torch.full((5,), float(transport.rank)), right)
    assert not library.calls
    transport.recv(out, left)
    assert outgoing.done() and out.tolist() == [float(left)] * 5
    assert library.calls[-1] == ("group", 2)


@pytest.mark.ranks
def test_deferred_messages_start_before_the_next_operation(transport: NcclTransport, library: FakeNccl) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    out = torch.empty(2)
    transport.isend(torch.full((2,), float(transport.rank)), right)
    transport.irecv(out, left)
    transport.barrier()
    assert out.tolist() == [float(left)] * 2 and library.calls[-1] == ("group", 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16])
def test_refuses_reductions_that_nccl_computes_differently_from_torch(dtype: torch.dtype, comm: Any) -> None:
    transport = NcclTransport(comm.transport, HOST, streams=Streams(), library=FakeNccl())
    assert not transport.reduces(dtype, "sum") and not transport.reduces(torch.float32, "max")
    with pytest.raises(CommunicationError, match=f"NCCL does not reduce {dtype} by sum as torch does; use"):
        transport.all_reduce(torch.zeros(2, dtype=dtype), "sum")


def test_dtypes_and_operations_have_the_numbers_of_nccl_h(comm: Any) -> None:
    library = FakeNccl()
    transport = NcclTransport(comm.transport, HOST, streams=Streams(), library=library)
    transport.all_reduce(torch.zeros(3, dtype=torch.int8), "min")
    transport.all_reduce(torch.zeros(3, dtype=torch.uint8), "max")
    transport.all_reduce(torch.zeros(3, dtype=torch.int32), "sum")
    transport.all_reduce(torch.zeros(3, dtype=torch.int64), "product")
    transport.all_reduce(torch.zeros(3, dtype=torch.float32), "sum")
    transport.all_reduce(torch.zeros(3, dtype=torch.float64), "average")
    transport.broadcast(torch.zeros(3, dtype=torch.bfloat16))
    assert [call[2:] for call in library.calls[:-1]] == [(0, 3), (1, 2), (2, 0), (4, 1), (7, 0), (8, 4)]
    assert library.calls[-1] == ("broadcast", 6, 1, 0)


def test_work_is_ordered_with_the_callers_stream_in_both_directions(comm: Any) -> None:
    streams = LazyStreams()
    transport = NcclTransport(comm.transport, HOST, streams=streams, library=FakeNccl(enqueue=streams.enqueue))
    tensor, seen = torch.zeros(4), torch.zeros(4)
    streams.enqueue(streams.caller, lambda: tensor.fill_(2.0))  # a kernel that the device has not run yet
    seen_by_nccl: list[float] = []

    def call(comm: Any, stream: int) -> None:
        streams.enqueue(stream, lambda: seen_by_nccl.append(tensor[0].item()))

    work = transport.channel.start("probe", [tensor], call)
    work.wait()
    streams.enqueue(streams.caller, lambda: seen.copy_(tensor + len(seen_by_nccl)))
    assert not work.done() and seen_by_nccl == []  # the host has not waited
    streams.synchronize(work.event)  # NCCL's stream alone must wait for its inputs
    assert seen_by_nccl == [2.0]
    streams.finish()
    assert seen_by_nccl == [2.0] and seen.tolist() == [3.0] * 4 and work.done()
    assert (tensor.data_ptr(), "stream1") in streams.recorded


def test_two_ranks_on_one_gpu_are_refused() -> None:
    check_own_gpus(["GPU-a", "GPU-b", "", ""])
    with pytest.raises(DeviceError, match="ranks 1 and 2 use one GPU .GPU-b. and NCCL refuses that") as caught:
        check_own_gpus(["GPU-a", "GPU-b", "GPU-b"])
    assert caught.value.everywhere


@pytest.mark.ranks
def test_a_failed_start_of_nccl_is_an_error_on_all_ranks(comm: Any, library: FakeNccl) -> None:
    library.failure = RuntimeError("no socket") if comm.rank == 0 else None
    with pytest.raises(CommunicationError, match="NCCL cannot start: no socket") as caught:
        NcclTransport(comm.transport, HOST, streams=Streams(), library=library)
    assert caught.value.everywhere


@pytest.mark.gpu
def test_nccl_on_one_gpu(comm: Any) -> None:
    from hpctrain.comm.device.nccl_channel import reason_unavailable

    if reason_unavailable():
        pytest.skip(reason_unavailable())
    device = torch.device("cuda", 0)
    transport = NcclTransport(comm.transport, device)
    for dtype in (torch.float32, torch.int64, torch.bool):
        tensor = torch.ones(1000, device=device, dtype=dtype)
        transport.all_reduce(tensor, "sum")
        out = torch.empty_like(tensor)
        transport.all_to_all(out, tensor, [1000], [1000])
        assert out.eq(1).all()
    transport.free()


@pytest.mark.gpu
@pytest.mark.ranks
def test_nccl_on_the_gpus_of_several_ranks(comm: Any) -> None:
    from hpctrain.comm.device.nccl_channel import reason_unavailable

    if reason_unavailable() or torch.cuda.device_count() < comm.local_size:
        pytest.skip(reason_unavailable() or "needs a GPU a rank")
    device = torch.device("cuda", comm.local_rank)
    transport = NcclTransport(comm.transport, device)
    tensor = torch.full((100_000,), float(comm.rank + 1), device=device)
    transport.all_reduce(tensor, "sum")
    assert tensor.eq(comm.size * (comm.size + 1) / 2).all()
    out = torch.empty(2, device=device)
    outgoing = transport.isend(torch.full((2,), float(comm.rank), device=device), (comm.rank + 1) % comm.size)
    transport.recv(out, (comm.rank - 1) % comm.size)
    outgoing.wait()
    assert out.eq((comm.rank - 1) % comm.size).all()
    transport.free()
