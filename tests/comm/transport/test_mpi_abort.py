"""Abort of the whole job, from any communicator of the transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_abort_from_a_split_communicator_ends_the_whole_job(launch: Any, tmp_path: Path) -> None:
    program = f"""
import sys, time
from mpi4py import MPI
from hpctrain.comm.transport.mpi import MpiTransport
world = MpiTransport(MPI.COMM_WORLD)
part = world.split(world.rank, 0)
if world.rank == 1:
    sys.stdout = open({str(tmp_path / "output")!r}, "w")  # a launcher may lose output of a rank that aborts
    print("leaving", end="")
    part.abort(9)
time.sleep(60)
"""
    result = launch(2, program, timeout=30)
    assert result.returncode != 0 and not result.survivors, result
    assert (tmp_path / "output").read_text() == "leaving"
