"""Staging as for a GPU, simulated in host memory and compared with none: one copy per step and direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.asynchronous_training import train

from hpctrain.parallel.asynchronous.parameter_server import ServedVector

pytestmark = pytest.mark.ranks(2, 3)
CPU = torch.device("cpu")


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["server", "server_synchronous", "hogwild", "easgd_asynchronous"])
def test_staged_training_equals_unstaged_training(own: Any, mode: str) -> None:
    tables = mode != "easgd_asynchronous"  # beside dense parameters
    expected = train(own, mode, CPU, tables=tables)
    found = train(own, mode, CPU, tables=tables, staged=True)
    # Under Hogwild differences are added instead of updates in place, which rounds once more.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_copies_once_per_direction(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of copies does not depend on the number of parameters: four here."""
    copies: list[str] = []

    def noted(self: ServedVector, *words: Any) -> Any:
        before = (self.values.data_ptr(), self.host.data_ptr(), self.device_gradient.data_ptr())
        assert len({*before, self.gradient.data_ptr()}) == 4, "no two of these are the same memory"
        copies.append("in")
        return take(self, *words)

    take = ServedVector.load_host
    monkeypatch.setattr(ServedVector, "load_host", noted)
    train(own, "server", CPU, steps=3, staged=True)
    assert len(copies) == 3 + 2  # copies at the meeting and at the end
