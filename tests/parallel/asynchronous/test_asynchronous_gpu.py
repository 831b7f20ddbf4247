"""Asynchronous strategies on a GPU, with parameters staged through host memory, compared with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.asynchronous_training import MODES, train

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]


@pytest.mark.parametrize("mode", MODES)
def test_training_on_a_gpu_equals_training_on_a_cpu(comm: Any, mode: str) -> None:
    expected = train(comm, mode, torch.device("cpu"))
    torch.testing.assert_close(train(comm, mode, torch.device("cuda")), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["server", "server_synchronous", "hogwild"])
def test_rows_of_tables_on_a_gpu_are_also_staged(comm: Any, mode: str) -> None:
    expected = train(comm, mode, torch.device("cpu"), tables=True)
    found = train(comm, mode, torch.device("cuda"), tables=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
