"""Memory that ranks of a node share without windows of MPI, under MPI with fault tolerance."""

from __future__ import annotations

from typing import Any

import pytest
from support.tolerance import TOLERANT, needs_tolerance

PROGRAM = """
import gc
import torch
from mpi4py import MPI
from hpctrain.comm.transport import reserve

world = MPI.COMM_WORLD
assert reserve.shares_files()
sizes = [4096, 0, 8192]
own = reserve.reserve_window(reserve.node_of(world), sizes[world.rank], lambda here: world.allreduce(here, MPI.LAND))
assert isinstance(own, reserve.SharedBytes)
parts = [memoryview(own.Shared_query(rank)[0]) for rank in range(3)]
assert [part.nbytes for part in parts] == sizes and not any(map(any, parts))
world.Barrier()
if parts[world.rank].nbytes:
    parts[world.rank][:8] = bytes([world.rank + 1]) * 8
world.Barrier()
assert [bytes(part[:8]) for part in parts] == [bytes([rank + 1]) * min(size, 8) for rank, size in enumerate(sizes)]
tensor = torch.frombuffer(own.Shared_query(2)[0], dtype=torch.uint8)
world.Barrier()
own.Free()
del own, parts
gc.collect()
assert tensor[:9].tolist() == [3] * 8 + [0], "memory lives as long as its tensors"
print("shared", flush=True)
"""
REFUSED = """
from mpi4py import MPI
from hpctrain.comm.transport import reserve

reserve._anonymous = lambda nbytes: -1
world = MPI.COMM_WORLD
try:
    reserve.reserve_window(reserve.node_of(world), 64, lambda here: world.allreduce(here, MPI.LAND))
except reserve.NoSpaceError as error:
    print(error, flush=True)
"""


@needs_tolerance
@pytest.mark.limit(60)
def test_every_rank_maps_the_parts_of_all(launch: Any) -> None:
    result = launch(3, PROGRAM, options=TOLERANT)
    assert result.returncode == 0 and result.stdout.count("shared") == 3, result
    assert "not tested" not in result.stderr, result


@needs_tolerance
@pytest.mark.limit(60)
def test_a_failure_is_the_error_of_all_ranks(launch: Any) -> None:
    result = launch(2, REFUSED, options=TOLERANT)
    assert result.returncode == 0 and result.stdout.count("cannot map memory of the first rank") == 2, result


@pytest.mark.limit(60)
def test_without_fault_tolerance_windows_of_mpi_are_used(launch: Any) -> None:
    program = "from hpctrain.comm.transport import reserve; print(reserve.shares_files(), flush=True)"
    result = launch(2, program)
    assert result.stdout.count("False") == 2 and "True" not in result.stdout, result
