"""Messages of more bytes than a signed 32-bit count can express: marks at both ends and around the limit arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NUMEL = 2**31 + 4099
MARKS = (0, 2**31 - 1, 2**31, NUMEL - 1)


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.limit(120)
def test_more_than_two_gib_arrive(comm: Any) -> None:
    tensor = torch.zeros(NUMEL, dtype=torch.uint8)
    other = 1 - comm.rank
    for mark in MARKS:
        tensor[mark] = 1 << comm.rank
    comm.all_reduce(tensor, "bor")
    assert [int(tensor[mark]) for mark in MARKS] == [3] * len(MARKS)
    tensor[list(MARKS)] = comm.rank + 5
    comm.broadcast(tensor, 1, algorithm="mpi")
    assert [int(tensor[mark]) for mark in MARKS] == [6] * len(MARKS)
    if comm.rank == 0:
        tensor[list(MARKS)] = 9
        comm.send(tensor, other)
    else:
        comm.recv(tensor, other)
    assert [int(tensor[mark]) for mark in MARKS] == [9] * len(MARKS)
    assert int(tensor[1 : 2**20].max()) == 0
