"""Errors of MPI operations in ranks that do not know yet which rank has died, under MPI with fault tolerance."""

from __future__ import annotations

from typing import Any

import pytest
from support.tolerance import TOLERANT, needs_tolerance

PROGRAM = """
import os, sys, time
import torch
from mpi4py import MPI
from hpctrain.comm.transport.mpi import MpiTransport

transport = MpiTransport(MPI.COMM_WORLD, message_bytes=64)
transport.barrier()
if transport.rank:
    while not os.path.exists("begun"):  # the other rank may still be in the barrier
        time.sleep(0.01)
    transport.comm.Revoke()  # as a rank does that has noticed a dead rank first
    while not os.path.exists("told"):  # MPI must stay until then
        time.sleep(0.01)
    os._exit(0)  # MPI_Finalize would wait for the other rank
open("begun", "w").close()
work = transport.irecv(torch.empty(256, dtype=torch.uint8), 1, 5)
try:
    if sys.argv[1] == "wait":
        work.wait()
    else:
        while not work.done():
            pass
except Exception as error:
    print(type(error).__name__, error, flush=True)
open("told", "w").close()
os._exit(0)
"""


@needs_tolerance
@pytest.mark.limit(60)
@pytest.mark.parametrize("call", ["wait", "done"])
def test_a_message_in_pieces_fails_like_one_message(launch: Any, call: str) -> None:
    result = launch(2, PROGRAM, call, options=TOLERANT)
    assert result.returncode == 0 and "RankFailedError another rank has died" in result.stdout, result
