"""Ranks take leave: together without a word, early with one."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.pace import scaled

from hpctrain.transport import farewell as module


@pytest.fixture
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _poll(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.ranks
def test_together_nobody_is_told(world: Any) -> None:
    farewell = module.Farewell(world)
    began = time.monotonic()
    farewell.leave()
    assert time.monotonic() - began < scaled(module.GRACE + 2)
    world.Barrier()
    assert farewell.who_left() == []


@pytest.mark.ranks
def test_who_leaves_early_says_so(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.05)
    farewell = module.Farewell(world)
    last = world.size - 1
    if world.rank != last:
        assert farewell.who_left() == []
        world.Barrier()
        # The last rank waits inside for the others; what it said arrives here. So may what a quicker one says then.
        _poll(lambda: last in farewell.who_left())
        assert last in farewell.who_left()  # once told, it is remembered
    else:
        world.Barrier()
    farewell.leave()


@pytest.mark.ranks
def test_notices_do_not_mix_with_other_traffic(world: Any, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(module, "GRACE", 0.0)
    farewell = module.Farewell(world)
    if world.rank == 0:
        for peer in range(1, world.size):
            comm.send(torch.full((3,), float(peer)), peer)
        farewell.leave()
        return
    _poll(lambda: 0 in farewell.who_left())
    assert comm.recv(torch.zeros(3), 0).tolist() == [float(world.rank)] * 3
    farewell.leave()
