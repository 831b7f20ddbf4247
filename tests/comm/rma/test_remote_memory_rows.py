"""Rows of matrices in one-sided memory: every carrier compared with plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.errors import UsageError

pytestmark = pytest.mark.ranks
START, HEIGHT, WIDTH = 5, 12, 3
ROWS = torch.tensor([7, 0, 1, 2, 11])  # a single row, adjacent rows, and the last row


@pytest.fixture(params=["mpi", "messages"])
def remote(comm: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return memory of every rank, by a carrier: some elements, a matrix, and one further element."""
    from hpctrain.comm.rma.select import expose

    monkeypatch.setenv("HPCTRAIN_ONESIDED", request.param)
    remote = expose(comm.transport, START + HEIGHT * WIDTH + 1, torch.float32)
    yield remote
    remote.free()


def test_exactly_the_given_rows_are_put_added_and_read(comm: Any, remote: Any) -> None:
    target = (comm.rank + (comm.size + 1) // 2) % comm.size  # on another node, if there are two
    values = torch.arange(15.0).view(5, WIDTH)
    with remote.recording() as recorder:
        remote.put_rows(target, values, ROWS, START)
        remote.add_rows(target, values[:2] + 100, ROWS[:2], START)
        remote.add_rows(target, torch.empty(0, WIDTH), ROWS[:0], START)
        back = torch.empty(3, WIDTH)
        remote.get_rows(target, back, ROWS[:3], START)
    far = remote.view(target) is None
    assert dict(recorder.bytes) == ({"put_rows": 60, "add_rows": 24, "get_rows": 36} if far else {})
    assert recorder.calls["get_rows"] == far
    remote.barrier()
    matrix = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    matrix[ROWS.numpy()] = values.numpy()
    matrix[ROWS[:2].numpy()] += values[:2].numpy() + 100
    assert np.array_equal(back.numpy(), matrix[ROWS[:3].numpy()])
    whole = np.concatenate([np.zeros(START, np.float32), matrix.reshape(-1), np.zeros(1, np.float32)])
    assert np.array_equal(remote.view(comm.rank).numpy(), whole)
    remote.barrier()


def test_rows_out_of_range_are_refused(comm: Any, remote: Any) -> None:
    for rows, values in (
        (torch.tensor([HEIGHT]), torch.zeros(1, WIDTH)),
        (torch.tensor([-1]), torch.zeros(1, WIDTH)),
        (torch.tensor([0, 1]), torch.zeros(1, WIDTH)),
        (torch.tensor([0], dtype=torch.int32), torch.zeros(1, WIDTH)),
        (torch.tensor([0]), torch.zeros(WIDTH)),
        (torch.tensor([0]), torch.zeros(1, WIDTH, dtype=torch.float64)),
    ):
        for call in (remote.get_rows, remote.put_rows, remote.add_rows):
            with pytest.raises(UsageError, match="exposed memory|elements|rows"):
                call(comm.size - 1, values, rows, START)
    remote.barrier()
