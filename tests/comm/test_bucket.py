"""Buckets of small tensors in one message: the same values as single operations, in fewer messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.errors import CommunicationError


def given(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((2, 3), float(rank + 1)).t(),
        torch.tensor(2.0 * rank),
        torch.arange(5) + rank,
        torch.empty(0),
        torch.full((4,), float(rank), dtype=torch.bfloat16)[::2],
    ]


@pytest.mark.ranks(1, 2, 3, 4)
def test_values_equal_those_of_single_operations(comm: Any) -> None:
    summed, averaged, copied = given(comm.rank), given(comm.rank)[:2], given(comm.rank)
    gathered = given(comm.rank)[2]
    with comm.bucket() as bucket:
        for tensor in summed:
            bucket.all_reduce(tensor)
        for tensor in averaged:
            bucket.all_reduce(tensor, "average")
        for tensor in copied:
            bucket.broadcast(tensor, comm.size - 1)
        bucket.reduce(gathered, "max", 0)
    for number, tensor in enumerate(summed):
        torch.testing.assert_close(tensor, sum(given(rank)[number] for rank in range(comm.size)))
    for number, tensor in enumerate(averaged):
        wanted = sum(given(rank)[number] for rank in range(comm.size)) / comm.size
        torch.testing.assert_close(tensor, wanted)
    for number, tensor in enumerate(copied):
        assert torch.equal(tensor, given(comm.size - 1)[number])
    assert torch.equal(gathered, given(comm.size - 1 if comm.rank == 0 else comm.rank)[2])


@pytest.mark.ranks
def test_one_message_per_operation_and_dtype(comm: Any) -> None:
    with comm.recording() as recorder, comm.bucket() as bucket:
        for _ in range(10):
            bucket.all_reduce(torch.ones(3))
            bucket.broadcast(torch.ones(2))
    assert recorder.calls == {"all_reduce": 1, "broadcast": 1}
    assert recorder.bytes == {"all_reduce": 120, "broadcast": 80}


@pytest.mark.ranks
def test_after_an_error_in_the_block_nothing_is_sent(comm: Any) -> None:
    tensor = torch.ones(1)
    with pytest.raises(CommunicationError, match="average of torch.int64 is not defined"), comm.bucket() as bucket:
        bucket.all_reduce(tensor)
        bucket.all_reduce(torch.ones(1, dtype=torch.int64), "average")
    assert tensor.item() == 1
