"""Exit notices: ranks that leave together send none, a rank that leaves early sends one."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.pace import scaled

from hpctrain.comm.transport.liveness import GRACE, ExitNotifier


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
def test_ranks_that_leave_together_send_no_notice(world: Any) -> None:
    notifier = ExitNotifier(world)
    began = time.monotonic()
    notifier.leave()
    assert time.monotonic() - began < scaled(GRACE + 2)
    world.Barrier()
    assert notifier.ranks_that_left() == []


@pytest.mark.ranks
def test_a_rank_that_leaves_early_sends_a_notice(world: Any) -> None:
    notifier = ExitNotifier(world, grace=0.05)
    last = world.size - 1
    if world.rank != last:
        assert notifier.ranks_that_left() == []
        world.Barrier()
        # The last rank waits in leave() for the others; its notice arrives here. So may the notice of a faster rank.
        _poll(lambda: last in notifier.ranks_that_left())
        assert last in notifier.ranks_that_left()  # a received notice is remembered
    else:
        world.Barrier()
    notifier.leave()


@pytest.mark.ranks
def test_notices_do_not_mix_with_other_traffic(world: Any, comm: Any) -> None:
    import torch

    notifier = ExitNotifier(world, grace=0.0)
    if world.rank == 0:
        for peer in range(1, world.size):
            comm.send(torch.full((3,), float(peer)), peer)
        notifier.leave()
        return
    _poll(lambda: 0 in notifier.ranks_that_left())
    assert comm.recv(torch.zeros(3), 0).tolist() == [float(world.rank)] * 3
    notifier.leave()
