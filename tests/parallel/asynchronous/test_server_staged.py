"""Staging as for parameters on a GPU, played in the host's memory, against none; one copy a step each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.staging import train

from hpctrain.parallel.asynchronous import flat
from hpctrain.parallel.asynchronous.store.served_vector import ServedVector

pytestmark = pytest.mark.ranks(2, 3)
CPU = torch.device("cpu")


def elsewhere(values: torch.Tensor) -> bool:
    """Take all parameters for such as are not in the host's memory."""
    return False


@pytest.mark.parametrize("mode", ["server", "server_synchronous", "hogwild", "easgd_asynchronous"])
def test_staged_workers_learn_the_same(own: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = mode != "easgd_asynchronous"  # beside dense parameters
    expected = train(own, mode, CPU, tables=tables)
    monkeypatch.setattr(flat, "on_host", elsewhere)
    found = train(own, mode, CPU, tables=tables)
    # Under Hogwild what has changed is added, instead of moving in place: that rounds once more.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_copies_once_each_way(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are: four here."""
    monkeypatch.setattr(flat, "on_host", elsewhere)
    copies: list[str] = []

    def noted(self: ServedVector, *words: Any) -> Any:
        before = (self.values.data_ptr(), self.host.data_ptr(), self._device_gradient.data_ptr())
        assert len({*before, self.gradient.data_ptr()}) == 4, "no two of these are the same memory"
        copies.append("in")
        return take(self, *words)

    take = ServedVector.take_host
    monkeypatch.setattr(ServedVector, "take_host", noted)
    train(own, "server", CPU, steps=3)
    assert len(copies) == 3 + 2  # those of the meeting and of the end
