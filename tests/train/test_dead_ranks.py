"""A dead rank under MPI with fault tolerance, where the launcher does not end the job, is named, and ends it."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from mpi4py import MPI
from support.tolerance import TOLERANT, needs_tolerance

from hpctrain.comm.transport import failures
from hpctrain.comm.transport.waiting import Activity
from hpctrain.errors import CommunicationError, RankFailedError

LOST = """
import os, signal, sys, time
import torch
import hpctrain

job = hpctrain.init()
torch.manual_seed(0)
model = job.wrap(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
where = sys.argv[1]
with job.run(model, optimizer, [torch.ones(4, 8)] * 20, checkpoints="run", split=False) as run:
    for step, batch in run:
        if step == 10 and job.rank == 1 and where != "nowhere":
            print("killed at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 10 and where == "object":
            job.comm.all_gather_object(step)
        if step == 10 and where == "busy":
            time.sleep(50)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("done")
"""


@needs_tolerance
@pytest.mark.limit(120)
@pytest.mark.parametrize("where", ("step", "object", "busy"))
def test_a_dead_rank_is_named_and_ends_the_job(launch: Any, where: str) -> None:
    result = launch(3, LOST, where, options=TOLERANT)
    assert result.returncode == 1 and not result.survivors, result
    said = re.findall(r"hpctrain: rank [02] of 3 on \S+ in step 10 ends the job: rank 1 on \S+ has died", result.stderr)
    assert len(said) == 1 == result.stderr.count("hpctrain: "), result
    assert "Traceback" not in result.stderr, result
    (killed,) = re.findall(r"killed at (\S+)", result.stdout)
    assert result.ended - float(killed) < 20, result  # far below HPCTRAIN_TIMEOUT and the sleep


DIES_LAST = """
import atexit, os, signal

def die():  # after all other functions that are called when the program ends, right before MPI_Finalize
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

atexit.register(die)
"""


@needs_tolerance
@pytest.mark.limit(120)
def test_a_rank_that_dies_when_the_job_ends_does_not_hold_up_the_others(launch: Any) -> None:
    for _ in range(2):  # the launcher notices most of these deaths
        result = launch(3, DIES_LAST + LOST, "nowhere", options=TOLERANT, timeout=40)
        assert result.stdout.count("done") == 3 and not result.survivors, result


@needs_tolerance
@pytest.mark.limit(120)
def test_a_job_without_failure_ends_as_without_fault_tolerance(launch: Any) -> None:
    result = launch(3, LOST, "nowhere", options=TOLERANT)
    assert result.returncode == 0 and result.stdout.count("done") == 3 and not result.survivors, result
    assert "has died" not in result.stderr, result


# One process ----------------------------------------------------------------------------------------------------------


def activity(classes: frozenset[int]) -> Activity:
    """Return a recorder of waits that takes these errors of MPI for those of a dead rank."""
    found = Activity()
    found.translate = functools.partial(failures.rank_failed, classes=classes)
    return found


def die() -> None:
    raise MPI.Exception(MPI.ERR_OTHER)


def test_errors_of_operations_with_a_dead_rank_name_the_operation() -> None:
    waits = activity(frozenset({MPI.ERR_OTHER}))
    with pytest.raises(RankFailedError, match="^all_gather_object: another rank has died$") as caught:
        with waits("all_gather_object"):
            die()
    assert isinstance(caught.value, CommunicationError) and isinstance(caught.value.__cause__, MPI.Exception)
    with pytest.raises(RankFailedError, match="^all_reduce: another"):
        waits.around("all_reduce", die)()
    assert not waits.operation


def test_other_errors_stay_as_they_are() -> None:
    for waits in (activity(frozenset({MPI.ERR_TRUNCATE})), activity(frozenset())):
        with pytest.raises(MPI.Exception):
            with waits("recv"):
                die()
        with pytest.raises(MPI.Exception):
            waits.around("recv", die)()
    with pytest.raises(KeyError):
        with activity(frozenset({MPI.ERR_OTHER}))("recv"):
            raise KeyError("a")


def test_fault_tolerance_is_read_from_the_launchers_variable() -> None:
    assert not failures.reports_failures({})
    assert not failures.reports_failures({"OMPI_MCA_mpi_ft_enable": "0"})
    known = MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN
    assert failures.reports_failures({"OMPI_MCA_mpi_ft_enable": "1"}) == known


def test_dead_ranks_are_named_with_their_hosts() -> None:
    hosts = [f"n{rank // 4}" for rank in range(64)]
    assert failures.dead_ranks([5], hosts) == "rank 5 on n1 has died"
    assert failures.dead_ranks([0, 63], hosts) == "ranks 0 on n0, 63 on n15 have died"
    assert failures.dead_ranks(range(10), hosts, most=2) == "ranks 0 on n0, 1 on n0 and 8 more have died"
