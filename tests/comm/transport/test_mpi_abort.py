"""Abort of the whole job, from any communicator of the transport."""

from __future__ import annotations

from typing import Any


def test_abort_from_a_split_communicator_ends_the_whole_job(launch: Any) -> None:
    program = """
import time
from mpi4py import MPI
from hpctrain.comm.transport.mpi import MpiTransport
world = MpiTransport(MPI.COMM_WORLD)
part = world.split(world.rank, 0)
if world.rank == 1:
    print("leaving", end="")
    part.abort(9)
time.sleep(60)
"""
    result = launch(2, program, timeout=30)
    assert result.returncode != 0 and "leaving" in result.stdout and not result.survivors
