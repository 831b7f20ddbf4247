"""Staging through host memory: every byte arrives, in chunks of the requested size, in any order of device work."""

from __future__ import annotations

import pytest
import torch
from fakes.streams import LazyStreams
from support.reductions import same_bits, values
from torch import Tensor

from hpctrain.comm.device.staging import StagedCopier, elementwise, in_shares
from hpctrain.comm.device.streams import CudaStreams, Streams

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool)
PIECE = 64


def double(target: Tensor, source: Tensor) -> None:
    target.copy_(source + source if source.dtype is not torch.bool else source.logical_not())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000])
def test_elementwise_operation_in_chunks(dtype: torch.dtype, numel: int) -> None:
    streams = LazyStreams()
    copier = StagedCopier(streams)
    tensor, expected = torch.zeros(numel, dtype=dtype), values(1, numel, dtype)
    for _ in range(2):  # the second run finds slots that are still being emptied
        expected = values(2, numel, dtype)
        streams.enqueue(streams.caller, lambda: tensor.copy_(values(2, numel, dtype)))
        pieces = elementwise(tensor, PIECE)
        copier.run(pieces, double, dtype)
        double(expected, expected.clone())
    streams.finish()
    assert same_bits(tensor, expected)
    assert len(pieces) == max(-(-numel * dtype.itemsize // PIECE), 1)


def test_copies_overlap_with_the_host_operation() -> None:
    streams = LazyStreams()
    copier = StagedCopier(streams)
    tensor = torch.zeros(30, dtype=torch.int16)
    copier.run(elementwise(tensor, 20), lambda target, source: streams.log.append("host operates"), torch.int16)
    inward, outward = "stream1 copies 10", "stream2 copies 10"
    kept = [line for line in streams.log if line in (inward, outward, "host operates")]
    assert kept == [
        inward,
        inward,
        "host operates",
        outward,
        inward,
        "host operates",
        outward,
        "host operates",
        outward,
    ]
    assert streams.log.count("pinned 64") == 2  # 20 bytes per slot, rounded up
    # The third chunk uses the first slot: its copy waits for the first copy out, on the stream and not on the host.
    assert streams.log[streams.log.index("host operates") :].count("stream1 waits for event4") == 1


def test_the_host_waits_only_for_the_inputs() -> None:
    streams = LazyStreams()
    tensor = torch.ones(40)
    StagedCopier(streams).run(elementwise(tensor, 40), double, torch.float32)
    assert tensor.tolist()[-1] == 1.0  # the last copy out has not run yet
    streams.finish()
    assert tensor.tolist() == [2.0] * 40


def test_pinned_memory_is_reused_and_grows() -> None:
    streams = LazyStreams()
    copier = StagedCopier(streams)
    for numel in (100, 50, 100, 1000, 1000):
        copier.run(elementwise(torch.ones(numel), 4 * numel), double, torch.float32)
    assert [line for line in streams.log if line.startswith("pinned")] == ["pinned 400", "pinned 4000"]


@pytest.mark.parametrize("numel", [0, 1, 7, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_and_scatter_in_chunks(numel: int, size: int) -> None:
    """The host operation replaces the other ranks: rank r holds this rank's values plus r."""
    streams = LazyStreams()
    copier = StagedCopier(streams)
    ranks = torch.arange(size, dtype=torch.float32)

    def gather(target: Tensor, source: Tensor) -> None:
        target.copy_((source + ranks[:, None]).view(-1))

    share, out = values(0, numel, torch.float32), torch.empty(size * numel)
    copier.run(in_shares(out, share, size, PIECE), gather, torch.float32)
    streams.finish()
    assert same_bits(out, (share + ranks[:, None]).view(-1))

    def scatter(target: Tensor, source: Tensor) -> None:
        target.copy_(source.view(size, target.numel()).sum(0))

    result = torch.empty(numel)
    copier.run(in_shares(result, out, size, PIECE), scatter, torch.float32)
    streams.finish()
    assert same_bits(result, out.view(size, numel).sum(0))


def test_send_only_copies_in_and_recv_only_copies_out() -> None:
    streams = LazyStreams()
    copier = StagedCopier(streams)
    wire: list[Tensor] = []
    source, target = torch.arange(40.0), torch.zeros(40)
    copier.run(elementwise(source, PIECE, write=False), lambda _, host: wire.append(host.clone()), torch.float32)
    assert sum("copies 16" in line for line in streams.log) == 2 and not any("stream2 copies" in x for x in streams.log)
    copier.run(elementwise(target, PIECE, read=False), lambda host, _: host.copy_(wire.pop(0)), torch.float32)
    streams.finish()
    assert target.tolist() == source.tolist()


def test_an_error_of_the_operation_leaves_the_copier_usable() -> None:
    streams = LazyStreams()
    copier = StagedCopier(streams)
    tensor = torch.ones(64)
    with pytest.raises(ValueError, match="boom"):
        copier.run(elementwise(tensor, PIECE), _boom, torch.float32)
    streams.finish()
    assert tensor.tolist() == [1.0] * 64
    copier.run(elementwise(tensor, PIECE), double, torch.float32)
    streams.finish()
    assert tensor.tolist() == [2.0] * 64


def _boom(target: Tensor, source: Tensor) -> None:
    raise ValueError("boom")


def test_staging_of_host_tensors() -> None:
    tensor = torch.arange(100.0)
    StagedCopier(Streams()).run(elementwise(tensor, PIECE), double, torch.float32)
    assert tensor.tolist() == [2.0 * number for number in range(100)]


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 1000, 3 * 2**20 + 5])
def test_staging_on_a_gpu(numel: int) -> None:
    streams: Streams = CudaStreams(torch.device("cuda", 0))
    copier = StagedCopier(streams)
    for _ in range(3):
        tensor = torch.arange(numel, device="cuda", dtype=torch.float32)
        copier.run(elementwise(tensor, 2**20), double, torch.float32)
        assert torch.equal(tensor, 2 * torch.arange(numel, device="cuda", dtype=torch.float32))


def test_a_chunk_reports_whether_it_is_processed_in_place() -> None:
    assert [piece.in_place for piece in elementwise(torch.ones(4), 8)] == [True, True]
    assert not elementwise(torch.ones(4), 8, read=False)[0].in_place
