"""Abort ends the whole job, whichever communicator the transport has."""

from __future__ import annotations

from typing import Any


def test_abort_from_a_part_of_the_world_ends_all_of_it(launch: Any) -> None:
    program = """
import time
from mpi4py import MPI
from hpctrain.transport.mpi import MpiTransport
world = MpiTransport(MPI.COMM_WORLD)
part = world.split(world.rank, 0)
if world.rank == 1:
    print("leaving", end="")
    part.abort(9)
time.sleep(60)
"""
    result = launch(2, program, timeout=30)
    assert result.returncode != 0 and "leaving" in result.stdout and not result.survivors
