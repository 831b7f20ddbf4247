"""Direct reductions by all-to-all exchange, over any transport."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.reductions import DTYPES, expected, ops_of, same_bits, values

from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.algorithms.direct import all_reduce, reduce_scatter
from hpctrain.comm.reduction import BLOCK, Reducer
from hpctrain.comm.transport.base import SingleTransport

LENGTHS = (0, 1, 2, 7, 64, 1000)


def test_slices_cover_the_tensor_in_nearly_equal_lengths() -> None:
    assert slices(10, 4) == [3, 3, 2, 2] and slices(2, 3) == [1, 1, 0] and slices(0, 2) == [0, 0]
    for numel in range(40):
        for size in range(1, 7):
            parts = slices(numel, size)
            assert sum(parts) == numel and max(parts) - min(parts) <= 1 and parts == sorted(parts, reverse=True)


@pytest.mark.parametrize("op", ["sum", "average"])
def test_one_rank_keeps_its_values(op: str) -> None:
    tensor, part = torch.arange(5.0), torch.empty(5)
    all_reduce(SingleTransport(), Reducer(), tensor, op)
    reduce_scatter(SingleTransport(), Reducer(), part, tensor, op)
    assert tensor.tolist() == part.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_in_rank_order(comm: Any, dtype: torch.dtype) -> None:
    everyone = [list(range(comm.size))]
    for numel, op in product(LENGTHS, ops_of(dtype)):
        tensor = values(comm.rank, numel, dtype)
        all_reduce(comm.transport, Reducer(), tensor, op)
        assert same_bits(tensor, expected(everyone, numel, dtype, op)), (numel, op)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_returns_the_slice_of_the_rank(comm: Any, dtype: torch.dtype) -> None:
    for numel in (*LENGTHS, comm.size * BLOCK + 1):
        tensor, counts = values(comm.rank, numel, dtype), slices(numel, comm.size)
        out = torch.empty(counts[comm.rank], dtype=dtype)
        reduce_scatter(comm.transport, Reducer(), out, tensor, "sum")
        whole = expected([list(range(comm.size))], numel, dtype, "sum")
        assert same_bits(out, torch.split(whole, counts)[comm.rank])
        assert same_bits(tensor, values(comm.rank, numel, dtype))


@pytest.mark.ranks
def test_all_reduce_is_not_done_before_all_ranks_have_called_it(comm: Any) -> None:
    tensor = values(comm.rank, 1000, torch.float32)
    if comm.rank == 0:
        comm.barrier()
    work = all_reduce.start(comm.transport, Reducer(), tensor, "sum")
    if comm.rank:
        assert not work.done()
        comm.barrier()
    while not work.done():
        pass
    work.wait()
    assert same_bits(tensor, expected([list(range(comm.size))], 1000, torch.float32, "sum"))


@pytest.mark.ranks
def test_bytes_equal_those_of_two_exchanges(comm: Any) -> None:
    numel = 120 * comm.size
    with comm.transport.recording() as recorder:
        all_reduce(comm.transport, Reducer(), torch.zeros(numel, dtype=torch.bfloat16), "sum")
    assert recorder.calls == {"all_to_all": 2} and recorder.bytes == {"all_to_all": 2 * 2 * numel}
