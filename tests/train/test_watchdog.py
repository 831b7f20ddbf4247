"""Failure of one rank ends the job soon, with a non-zero code and the reason once (in a run: test_run_aborts)."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from support.pace import scaled

from hpctrain.train.watchdog import print_stacks

WAIT = {"window": "job.comm.all_reduce(shared)", "mpi": "job.comm.barrier()"}
JOB = """
import os, signal, sys, time
import hpctrain

job = hpctrain.init()
shared = job.comm.empty(1000)
job.guard.step = 7
if {who}:
    print("harm at", time.time(), flush=True)
    {what}
{then}
print(f"rank {{job.rank}} reached its end")
"""


class Ended:
    """Result of a job, and the seconds from the failure to its end."""

    def __init__(self, result: Any) -> None:
        self.returncode, self.stderr = result.returncode, result.stderr
        began = re.search(r"harm at (\S+)\n", result.stdout)
        self.seconds = result.ended - float(began[1]) if began else 0.0
        self.stdout = re.sub(r"harm at .*\n", "", result.stdout)
        self.text = str(result)

    def __repr__(self) -> str:
        return f"{self.seconds:.1f} s after the harm: {self.text}"


@pytest.fixture
def harmed(launch: Any) -> Any:
    """Return a function that runs a job in which rank 1 executes ``what``, and the others then execute ``then``."""

    def run(what: str, *, who: str = "job.rank == 1", then: str = WAIT["window"], n: int = 2, **options: Any) -> Any:
        result = launch(n, JOB.format(what=what, who=who, then=then), timeout=50, **options)
        assert not result.survivors
        return Ended(result)

    return run


def _said_once(result: Any, pattern: str) -> None:
    assert len(re.findall(pattern, result.stderr)) == 1, result


def test_an_exception_of_one_rank_ends_the_job(harmed: Any) -> None:
    """The other rank waits in MPI; in a run (test_run_aborts) it waits in shared memory."""
    result = harmed("raise KeyError('boom')", then=WAIT["mpi"])
    assert result.returncode == 1 and result.seconds < scaled(10), result
    _said_once(result, "Traceback")
    _said_once(result, r"hpctrain: rank 1 of 2 on \S+ in step 7 ends the job: KeyError: 'boom'")
    assert "reached its end" not in result.stdout


def test_an_exception_of_all_ranks_is_printed_once(harmed: Any) -> None:
    result = harmed("raise ValueError('boom')", who="True", n=3)
    assert result.returncode == 1 and result.seconds < scaled(10), result
    _said_once(result, "Traceback")
    _said_once(result, "ends the job: ValueError: boom")


def test_a_rank_may_exit_early_if_the_others_do_not_need_it(harmed: Any) -> None:
    result = harmed("sys.exit(0)", then="time.sleep(4)")
    assert result.returncode == 0 and "ends the job" not in result.stderr, result
    assert result.stdout == "rank 0 reached its end\n" and result.seconds >= 3.5


def test_the_exit_code_of_all_ranks_is_that_of_the_job(harmed: Any) -> None:
    result = harmed("sys.exit(3)", who="True")
    assert result.returncode == 3 and "ends the job" not in result.stderr, result


def test_a_hanging_rank_ends_the_job_at_the_deadline(harmed: Any) -> None:
    result = harmed("time.sleep(1000)", env={"HPCTRAIN_TIMEOUT": "3"})
    assert result.returncode == 1 and result.seconds < scaled(3 + 10), result
    # Either the wait itself or the watchdog reports first.
    late = r"(local ranks \[1\] have not arrived|all_reduce has not ended) within 3 s .*"
    _said_once(result, f"rank 0 of 2 .* ends the job: .*{late}")
    assert "[1]" in result.stderr or "rank 1 is in no collective" in result.stderr
    for rank in (0, 1):
        _said_once(result, f"the stacks of rank {rank} on")
    last = result.stderr.partition("the stacks of rank 1 on")[2]
    assert re.search(r'job1\.py", line 10 in <module>', last), result  # where it sleeps


def test_a_stopped_rank_is_named(harmed: Any) -> None:
    options = {"then": WAIT["mpi"], "env": {"HPCTRAIN_TIMEOUT": "4"}}
    result = harmed("os.kill(os.getpid(), signal.SIGSTOP)", **options)
    assert result.returncode == 1 and result.seconds < scaled(4 + 10), result
    _said_once(result, r"barrier has not ended within 4 s .*; rank 1 has not responded for \d+ s")


def test_ranks_in_different_collectives_are_named(harmed: Any) -> None:
    options = {"then": "job.comm.broadcast_object(1) if job.rank else job.comm.barrier()", "who": "False"}
    result = harmed("pass", env={"HPCTRAIN_TIMEOUT": "3"}, n=3, **options)
    assert result.returncode == 1 and result.seconds < scaled(3 + 10), result
    _said_once(result, "ends the job: .*has not ended within 3 s")
    others = "; ".join(f"rank {rank} waits in broadcast_object" for rank in (1, 2))
    assert f"rank 0 waits in barrier; {others}" in result.stderr


def test_a_deadline_that_is_not_a_number_is_refused(harmed: Any) -> None:
    result = harmed("pass", env={"HPCTRAIN_TIMEOUT": "soon"})
    assert result.returncode == 2, result
    _said_once(result, "HPCTRAIN_TIMEOUT='soon' is not a number of seconds above 0")
    assert "Traceback" not in result.stderr


ALONE = """
import os, signal, time
import hpctrain

job = hpctrain.init()
pids = job.comm.all_gather_object(os.getpid())
if job.rank == 1:
    print("harm at", time.time(), flush=True)
    for name in {names}:
        os.kill(pids[0], getattr(signal, name))
    time.sleep(6)
job.comm.barrier()
print(f"rank {{job.rank}} reached its end")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("names, ends", [(["SIGTERM"], True), (["SIGTERM", "SIGUSR1"], False)])
def test_sigterm_without_the_expected_sigusr1_ends_the_job(launch: Any, names: list[str], ends: bool) -> None:
    # As srun does after the death of a rank: the other ranks wait for it, and get SIGTERM.
    result = Ended(launch(2, ALONE.format(names=names), timeout=50, env={"HPCTRAIN_ASKED_BY": "USR1"}))
    assert (result.returncode != 0) == ends, result
    if ends:
        assert result.seconds < scaled(10), result
        _said_once(result, r"rank 0 of 2 on \S+ ends the job: a rank has died \(SIGTERM without SIGUSR1")
    else:
        assert result.stdout.count("reached its end") == 2


# Stacks of all threads, written at once under a heading ---------------------------------------------------------------


def test_stacks_of_all_threads_have_one_heading(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()

    def waits_here() -> None:
        done.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    print_stacks("rank 3 on n1")
    done.set()
    thread.join()
    said = capfd.readouterr().err
    assert said.startswith("hpctrain: the stacks of rank 3 on n1:\n")
    assert "in waits_here" in said and "in test_stacks_of_all_threads_have_one_heading" in said
