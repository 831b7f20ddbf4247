"""Choice of the carrier of one-sided memory: one-sided MPI or messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hpctrain.comm.rma.remote_memory import WORDS, Lock
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.errors import SettingsError, UsageError


def test_a_world_of_one_needs_no_mpi() -> None:
    remote = expose(SingleTransport(), 4, torch.float64, WORDS + 1)
    remote.put(0, torch.arange(4.0, dtype=torch.float64))
    remote.add(0, torch.ones(2, dtype=torch.float64), 1)
    out = torch.empty(3, dtype=torch.float64)
    remote.get(0, out, 1)
    assert out.tolist() == [2, 3, 3] and remote.name == "alone"
    assert [remote.fetch_add(0, WORDS, amount) for amount in (2, 3, 0)] == [0, 2, 5]
    with Lock(remote).of(0), pytest.raises(UsageError, match="elements 3 to 5 of rank 0: there are 4"):
        remote.put(0, torch.zeros(2, dtype=torch.float64), 3)
    remote.free()


def test_an_unknown_carrier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_ONESIDED", "pigeons")
    with pytest.raises(SettingsError, match="HPCTRAIN_ONESIDED='pigeons': allowed are auto, mpi, messages"):
        expose(SingleTransport(), 1)


@pytest.mark.ranks
def test_mpi_is_used_if_its_self_test_passes(comm: Any) -> None:
    remote = expose(comm.transport, 1)
    assert remote.name == ("one-sided MPI" if comm.size > 1 or comm.transport.name == "mpi" else "alone")
    remote.free()


@pytest.mark.ranks
@pytest.mark.parametrize("broken", ["add", "fetch_add"])
def test_messages_replace_an_mpi_that_loses_additions(comm: Any, broken: str, messages: list[str]) -> None:
    from hpctrain.comm.rma.mpi_memory import RemoteMemoryByRma, self_test

    class Losing(RemoteMemoryByRma):
        """One-sided memory of which the last rank loses additions."""

        def add(self, rank: int, values: torch.Tensor, start: int = 0) -> None:
            if broken != "add" or comm.rank < comm.size - 1:
                super().add(rank, values, start)

        def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
            lost = broken == "fetch_add" and comm.rank == comm.size - 1
            return super().fetch_add(rank, word, 0 if lost else amount)

    remote = expose(comm.transport, 1, self_test=partial(self_test, memory=Losing))
    assert remote.name == "messages"
    told = [text for text in messages if "one-sided MPI" in text]
    assert len(told) == (1 if comm.rank == 0 else 0)
    remote.free()
