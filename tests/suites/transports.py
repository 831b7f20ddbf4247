"""Conformance suites of transports: a back end subclasses one and provides the fixture ``transport``."""

from __future__ import annotations

import socket
from itertools import product
from typing import Any

import pytest
import torch
from support.reductions import expected, ops_of, same_bits, values

from hpctrain.comm.transport.base import TAGS, TensorTransport, Transport
from hpctrain.errors import CommunicationError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
LENGTHS = (0, 1, 7, 100)


def everyone(transport: TensorTransport) -> list[list[int]]:
    return [list(range(transport.size))]


class TensorTransportSuite:
    """Tests that run on any number of ranks, one included."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_broadcast_sends_the_tensor_of_any_root(self, transport: TensorTransport, dtype: torch.dtype) -> None:
        for root in range(transport.size):
            for numel in LENGTHS:
                tensor = values(transport.rank, numel, dtype, seed=root)
                transport.broadcast(tensor, root)
                assert same_bits(tensor, values(root, numel, dtype, seed=root))

    def test_a_scalar_and_a_matrix_are_broadcast(self, transport: TensorTransport) -> None:
        for shape in ((), (3, 5)):
            tensor = torch.full(shape, float(transport.rank))
            transport.broadcast(tensor, transport.size - 1)
            assert torch.equal(tensor, torch.full(shape, float(transport.size - 1)))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_all_reduce_of_whole_numbers_is_exact(self, transport: TensorTransport, dtype: torch.dtype) -> None:
        for numel, op in product(LENGTHS, ops_of(dtype)):
            assert transport.reduces(dtype, op)
            tensor = values(transport.rank, numel, dtype)
            transport.all_reduce(tensor, op)
            assert same_bits(tensor, expected(everyone(transport), numel, dtype, op)), (numel, op)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_all_reduce_of_floats_gives_all_ranks_the_same_bits(
        self, comm: Any, transport: TensorTransport, dtype: torch.dtype
    ) -> None:
        for op in ("sum", "product"):
            tensor = values(transport.rank, 100, dtype)
            transport.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, expected(everyone(transport), 100, dtype, op))
            assert all(same_bits(tensor, other) for other in comm.all_gather_object(tensor))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_all_gather_puts_the_ranks_in_order(self, transport: TensorTransport, dtype: torch.dtype) -> None:
        for numel in LENGTHS:
            out = torch.zeros(transport.size * numel, dtype=dtype)
            transport.all_gather(out, values(transport.rank, numel, dtype))
            assert same_bits(out, torch.cat([values(rank, numel, dtype) for rank in range(transport.size)]))

    def test_all_gather_works_in_place(self, transport: TensorTransport) -> None:
        out = torch.zeros(transport.size, 50)
        out[transport.rank] = values(transport.rank, 50, torch.float32)
        transport.all_gather(out, out[transport.rank])
        assert torch.equal(out, torch.stack([values(rank, 50, torch.float32) for rank in range(transport.size)]))

    @pytest.mark.parametrize("polled", [False, True])
    def test_all_to_all_exchanges_unequal_parts(self, transport: TensorTransport, polled: bool) -> None:
        # Rank s sends s + 2 r elements to rank r, so one of the parts is empty.
        me, ranks = transport.rank, range(transport.size)
        sent, received = [me + 2 * rank for rank in ranks], [rank + 2 * me for rank in ranks]
        tensor = torch.cat([torch.full((count,), 10 * me + rank) for rank, count in enumerate(sent)])
        out = torch.zeros(sum(received), dtype=torch.int64)
        if polled:
            work = transport.iall_to_all(out, tensor, sent, received)
            while not work.done():
                pass
            work.wait()
        else:
            transport.all_to_all(out, tensor, sent, received)
        assert torch.equal(out, torch.cat([torch.full((n,), 10 * rank + me) for rank, n in enumerate(received)]))

    def test_unsupported_tensors_are_refused(self, transport: TensorTransport) -> None:
        message = f"{transport.name} of this rank carries tensors on cpu, not one on meta"
        with pytest.raises(CommunicationError, match=message):
            transport.broadcast(torch.empty(4, device="meta"))
        with pytest.raises(CommunicationError, match=r"contiguous tensors, not strides \(1, 4\)"):
            transport.all_reduce(torch.empty(2, 4).t(), "sum")
        with pytest.raises(CommunicationError, match="contiguous"):
            transport.all_gather(torch.empty(8)[::2], torch.empty(2))
        with pytest.raises(CommunicationError, match="contiguous"):
            transport.all_to_all(torch.empty(4), torch.empty(8)[::2], [4], [4])

    def test_invalid_ranks_and_tags_are_refused(self, transport: TensorTransport) -> None:
        for rank in (-1, transport.size):
            for call in (transport.send, transport.recv, transport.isend, transport.irecv, transport.broadcast):
                with pytest.raises(CommunicationError, match=f"rank {rank} is not in 0..{transport.size - 1}$"):
                    call(torch.empty(1), rank)
        for tag in (-1, transport.tags, TAGS):
            with pytest.raises(CommunicationError, match=rf"tag {tag} is not in 0..{transport.tags - 1} \(transport"):
                transport.isend(torch.empty(1), 0, tag)

    def test_recorder_counts_calls_and_bytes_exactly(self, transport: TensorTransport) -> None:
        equal = [2] * transport.size
        tensor, whole = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2 * transport.size)
        with transport.recording() as recorder:
            transport.broadcast(tensor)
            transport.broadcast(torch.empty(0))
            transport.all_reduce(tensor, "sum")
            transport.all_gather(whole, whole[:2].clone())
            transport.all_to_all(torch.empty_like(whole), whole, equal, equal)
            transport.barrier()
        transport.broadcast(tensor)
        assert recorder.calls == {"broadcast": 2, "all_reduce": 1, "all_gather": 1, "all_to_all": 1}
        assert recorder.bytes == {"broadcast": 24, "all_reduce": 24, "all_gather": 8, "all_to_all": 8 * transport.size}


class TransportSuite(TensorTransportSuite):
    """Tests of transports that also carry objects and can be split."""

    def test_objects_are_broadcast_and_gathered(self, transport: Transport) -> None:
        ranks = range(transport.size)
        assert transport.all_gather_object({"rank": transport.rank}) == [{"rank": rank} for rank in ranks]
        for root in ranks:
            assert transport.broadcast_object(("from", transport.rank), root) == ("from", root)

    def test_split_orders_by_key(self, transport: Transport) -> None:
        part = transport.split(transport.rank % 2, -transport.rank)
        alike = [rank for rank in reversed(range(transport.size)) if rank % 2 == transport.rank % 2]
        assert (part.size, part.rank) == (len(alike), alike.index(transport.rank))
        assert part.all_gather_object(transport.rank) == alike
        part.barrier()
        part.free()

    def test_split_node_keeps_the_ranks_of_this_machine(self, transport: Transport) -> None:
        node = transport.split_node()
        names = transport.all_gather_object(socket.gethostname())
        here = [rank for rank, name in enumerate(names) if name == names[transport.rank]]
        assert (node.size, node.rank) == (len(here), here.index(transport.rank))
        node.free()
