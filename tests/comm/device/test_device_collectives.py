"""Collectives of device tensors: the same values on every path, 16-bit floats and NaN as on the host.

The device is a fake on the host, with a NCCL that is implemented by MPI.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.nccl import FakeNccl
from support.reductions import expected, same_bits, values

from hpctrain.comm.device.collectives import DeviceCollectives
from hpctrain.comm.device.cuda_mpi import CudaMpiTransport
from hpctrain.comm.device.nccl import NcclTransport
from hpctrain.comm.device.paths import Path, PathCapabilities
from hpctrain.comm.device.streams import Streams
from hpctrain.comm.dispatch import HostCollectives, OperationQueue
from hpctrain.comm.prepared import FlatHostCollectives
from hpctrain.errors import CommunicationError

pytestmark = pytest.mark.ranks
HOST = torch.device("cpu")
ABLE: dict[Path, PathCapabilities] = {
    "nccl": PathCapabilities("", "no"),
    "mpi": PathCapabilities("no", ""),
    "staged": PathCapabilities("no", "no"),
}
NUMEL = 37
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OPS = ("sum", "average", "min", "max", "product")
CASES = [(dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in OPS if op != "average" or dtype in FLOATS]


@pytest.fixture(params=ABLE)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def made() -> list[Path]:
    return []


@pytest.fixture
def device(comm: Any, host: FlatHostCollectives, path: Path, made: list[Path]) -> Iterator[DeviceCollectives]:
    def make(path: Path) -> Any:
        made.append(path)
        if path == "nccl":
            return NcclTransport(comm.transport, HOST, streams=Streams(), library=FakeNccl())
        return CudaMpiTransport(comm.transport.comm, HOST)

    any_host = HostCollectives(host)
    any_host.queue = OperationQueue()
    collectives = DeviceCollectives(any_host, HOST, ABLE[path], make, piece_bytes=64)
    yield collectives
    collectives.free()


@pytest.mark.parametrize("dtype, op", CASES, ids=str)
def test_all_reduce(comm: Any, device: DeviceCollectives, dtype: torch.dtype, op: str) -> None:
    tensor = values(comm.rank, NUMEL, dtype)
    device.run("all_reduce", tensor, op=op)
    wanted = expected([list(range(comm.size))], NUMEL, dtype, op)
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(tensor, wanted)
    else:
        assert same_bits(tensor, wanted)
    assert all(same_bits(tensor, other) for other in comm.all_gather_object(tensor))


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_of_one_rank_is_returned_on_all_ranks(comm: Any, device: DeviceCollectives, op: str) -> None:
    tensor = torch.full((5,), float(comm.rank))
    if comm.rank == 1:
        tensor[3] = torch.nan
    device.run("all_reduce", tensor, op=op)
    assert tensor.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduce_scatter_and_all_gather(comm: Any, device: DeviceCollectives, dtype: torch.dtype) -> None:
    whole, out = values(comm.rank, NUMEL * comm.size, dtype), torch.empty(NUMEL, dtype=dtype)
    device.run("reduce_scatter", whole, out, op="sum")
    total = expected([list(range(comm.size))], NUMEL * comm.size, dtype, "sum")
    torch.testing.assert_close(out, total[comm.rank * NUMEL : (comm.rank + 1) * NUMEL])
    gathered = torch.empty_like(whole)
    device.run("all_gather", out, gathered)
    torch.testing.assert_close(gathered, total)


def test_broadcast_of_strided_memory(comm: Any, device: DeviceCollectives) -> None:
    for root in range(comm.size):
        tensor = values(comm.rank, 60, torch.float32).view(6, 10).t()
        device.run("broadcast", tensor, root=root)
        assert same_bits(tensor, values(root, 60, torch.float32).view(6, 10).t())


@pytest.mark.parametrize("tag", [0, 3])
def test_messages_arrive_on_the_device(comm: Any, device: DeviceCollectives, tag: int) -> None:
    out = torch.empty(NUMEL)
    if comm.rank == 0:
        device.send(values(0, NUMEL, torch.float32), 1, tag)
    elif comm.rank == 1:
        device.recv(out, 0, tag)
        assert same_bits(out, values(0, NUMEL, torch.float32))


@pytest.mark.parametrize("path", ["staged"], indirect=True)
def test_a_staged_message_may_be_received_on_the_host(
    comm: Any, host: FlatHostCollectives, device: DeviceCollectives
) -> None:
    out = torch.empty(NUMEL)
    if comm.rank == 0:
        device.send(values(0, NUMEL, torch.float32), 1)
    elif comm.rank == 1:
        host.transport.recv(out, 0)
        assert same_bits(out, values(0, NUMEL, torch.float32))


def test_paths_are_logged_and_set_up_once_and_before_a_message_needs_them(
    comm: Any,
    device: DeviceCollectives,
    path: Path,
    made: list[Path],
    messages: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "hpctrain")
    ready = [] if path == "staged" else [path]
    assert made == ready
    for _ in range(2):
        device.run("all_reduce", torch.ones(3), op="sum")
    assert made == ready
    texts = {"nccl": "by NCCL", "mpi": "by MPI with device pointers", "staged": "through host memory"}
    assert [text.split(":")[0] for text in messages] == [f"tensors on the GPU travel {texts[path]}"] * (comm.rank == 0)


def test_another_device_and_an_unsupported_path_are_refused(device: DeviceCollectives, path: Path) -> None:
    with pytest.raises(CommunicationError, match="broadcast of a tensor on meta: this rank's tensors are on cpu"):
        device.run("broadcast", torch.empty(1, device="meta"), root=0)
    other = "mpi" if path == "nccl" else "nccl"
    with pytest.raises(CommunicationError, match=f"algorithm {other} cannot do all_reduce on the GPU: no; able are"):
        device.run("all_reduce", torch.ones(1), op="sum", algorithm=other)
