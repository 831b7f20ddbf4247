"""Gathered rows and their gradients; tests/scripts trains with a loss over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.errors import MismatchError

pytestmark = pytest.mark.ranks
COUNTS = {"even": [2, 2, 2, 2], "uneven": [3, 1, 2, 4], "without": [0, 2, 1, 0]}
DIVIDED = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def rows_of(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count * 3, dtype=torch.float64).view(count, 3) + 100 * rank).to(dtype)


# Values ---------------------------------------------------------------------------------------------------------------


@DIVIDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_rows_are_in_rank_order(comm: Any, counts: Any, dtype: torch.dtype) -> None:
    wanted = torch.cat([rows_of(rank, counts[rank], dtype) for rank in range(comm.size)])
    found = comm.all_gather(rows_of(comm.rank, counts[comm.rank], dtype))
    assert torch.equal(found, wanted) and not found.requires_grad
    strided = rows_of(comm.rank, counts[comm.rank], dtype).t().contiguous().t()
    assert torch.equal(comm.all_gather(strided), wanted)


def test_empty_shares_gather_to_an_empty_tensor(comm: Any) -> None:
    assert comm.all_gather(torch.empty(0, 3)).shape == (0, 3)


def test_all_gather_into_a_tensor_without_grad_is_unchanged(comm: Any) -> None:
    out, own = torch.empty(comm.size, 3), rows_of(comm.rank, 1)
    with comm.recording() as recorder:
        assert comm.all_gather(out, own) is out
    assert recorder.calls == {"all_gather": 1} and not out.requires_grad
    with torch.no_grad():
        assert comm.all_gather(out, own.clone().requires_grad_()) is out
    assert torch.equal(out, torch.cat([rows_of(rank, 1) for rank in range(comm.size)]))


# Gradients ------------------------------------------------------------------------------------------------------------


def factors(rank: int, total: int) -> Tensor:
    return torch.randn(total, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@DIVIDED
def test_gradients_are_sums_over_all_ranks(comm: Any, counts: Any) -> None:
    """The sums are over weighted losses; a rank of weight 0 has a placeholder, which gets no gradient."""
    counts = counts[: comm.size]
    total, begin, count = sum(counts), sum(counts[: comm.rank]), counts[comm.rank]
    for weights in ([1.0] * comm.size, [each * comm.size / total for each in counts]):
        weight = weights[comm.rank]
        own = rows_of(comm.rank, count if weight else 1, torch.float64).requires_grad_()
        gathered = comm.all_gather(own, weight=weight)
        assert len(gathered) == total
        (gathered.square() * factors(comm.rank, total)).sum().backward()
        wanted = sum(2 * gathered.detach() * factors(rank, total) * weights[rank] for rank in range(comm.size))
        assert own.grad is not None and isinstance(wanted, Tensor)
        if weight:
            torch.testing.assert_close(own.grad, wanted[begin : begin + count] / weight)
        else:
            assert own.grad.eq(0).all()


def test_gradients_flow_through_a_given_output_tensor(comm: Any) -> None:
    out = torch.empty(comm.size, 3, dtype=torch.float64)
    for _ in range(2):  # the memory may be used again
        own = rows_of(comm.rank, 1, torch.float64).requires_grad_()
        gathered = comm.all_gather(out, own)
        assert gathered.data_ptr() == out.data_ptr() and not out.requires_grad
        (gathered * factors(comm.rank, comm.size)).sum().backward()
        assert own.grad is not None
        wanted = torch.stack([factors(rank, comm.size) for rank in range(comm.size)]).sum(0)
        torch.testing.assert_close(own.grad, wanted[comm.rank : comm.rank + 1])


def test_expanded_gradients_are_not_written_in_place(comm: Any) -> None:
    own = torch.ones(1 + comm.rank, 2, requires_grad=True)
    comm.all_gather(own).sum().backward()  # its gradient is one number, expanded
    assert own.grad is not None and torch.equal(own.grad, torch.full_like(own, comm.size))


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_tensors_of_different_shapes_are_refused_on_all_ranks(comm: Any) -> None:
    last = comm.rank == comm.size - 1
    cases = [
        (torch.zeros(2, 4 if last else 3), r"rank 0 has \[2, 3\] of torch\.float32, rank . has \[2, 4\] of"),
        (torch.zeros((2, 3, 1) if last else (2, 3)), r"rank . has \[2, 3, 1\] of torch\.float32; only the first dim"),
        (torch.zeros(2, 3, dtype=torch.float64 if last else torch.float32), r"has \[2, 3\] of torch\.float64; only"),
        (torch.zeros(2, 3, requires_grad=last), r"the tensor of rank . requires a gradient, that of rank 0 does not"),
        (torch.zeros(()), r"rank 0 has a scalar; allowed are tensors of at least one dim; pass tensor\.reshape\(1\)"),
    ]
    for tensor, said in cases:
        with pytest.raises(MismatchError, match=said) as raised:
            comm.all_gather(tensor)
        assert raised.value.everywhere
