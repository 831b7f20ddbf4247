"""Workers of their own on a GPU, whose parameters are staged through the host's memory, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.staging import MODES, train

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]


@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_workers_learn_what_they_learn_on_a_cpu(comm: Any, mode: str) -> None:
    expected = train(comm, mode, torch.device("cpu"))
    torch.testing.assert_close(train(comm, mode, torch.device("cuda")), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["server", "server_synchronous", "hogwild"])
def test_rows_of_tables_on_a_gpu_are_staged_too(comm: Any, mode: str) -> None:
    expected = train(comm, mode, torch.device("cpu"), tables=True)
    found = train(comm, mode, torch.device("cuda"), tables=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
