"""Lookup of the job of ``--after`` before a submission."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs.submit import job_to_wait_for


def pbs(jobs: dict[str, Any]) -> Any:
    """Return a fake of qstat and qselect with these jobs, all of one user."""

    def ask(command: Sequence[str]) -> str:
        alive = {name: job for name, job in jobs.items() if job["job_state"] != "F"}
        if command[0] == "qselect":
            return "\n".join(alive)
        known = jobs if "-x" in command else alive
        found = {name: job for name, job in known.items() if {name, name.partition(".")[0]} & set(command)}
        return json.dumps({"pbs_version": "23.06.06", "Jobs": found})

    return ask


def job(state: str, chain: str = "") -> dict[str, Any]:
    return {"job_state": state, "Variable_List": {"HPCTRAIN_CHAIN": chain} if chain else {}}


CHAIN = {"7.h": job("F"), "8.h": job("F", "7.h"), "9.h": job("R", "7.h"), "10.h": job("Q", "7.h"), "11.h": job("Q")}


@pytest.mark.parametrize(
    "jobs, after, waits_for",
    [
        (CHAIN, "7", "10.h"),
        (CHAIN, "8.h", "10.h"),
        (CHAIN, "11", "11.h"),
        ({"7.h": job("F"), "8.h": job("F", "7.h")}, "7.h", ""),
        ({"7.h": job("R")}, "7.h", "7.h"),
    ],
)
def test_the_newest_job_of_the_chain_is_waited_for(jobs: dict[str, Any], after: str, waits_for: str) -> None:
    assert job_to_wait_for("pbs", after, pbs(jobs)) == waits_for


def test_an_unknown_job_is_refused() -> None:
    """qsub accepts it without a message."""
    with pytest.raises(UsageError, match="--after 99: PBS knows no such job; allowed are jobs that qstat -x shows"):
        job_to_wait_for("pbs", "99", pbs(CHAIN))


@pytest.mark.parametrize("after", ["7[]", "7[].server", "7[2].server"])
def test_an_array_of_pbs_is_refused(after: str) -> None:
    with pytest.raises(UsageError, match="tasks of a PBS array restart as jobs of their own"):
        job_to_wait_for("pbs", after, pbs(CHAIN))


@pytest.mark.parametrize("scheduler, after", [("slurm", "12.server"), ("slurm", "1;x"), ("pbs", "1 2"), ("pbs", "-1")])
def test_a_malformed_job_id_is_refused(scheduler: str, after: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a job; allowed is one such as 1234 or 1234[._]"):
        job_to_wait_for(scheduler, after, pbs(CHAIN))


def test_slurm_ids_are_left_to_sbatch() -> None:
    assert job_to_wait_for("slurm", "12_3", lambda command: pytest.fail("asked")) == "12_3"


def test_without_an_answer_the_id_is_left_to_qsub() -> None:
    assert job_to_wait_for("pbs", "12", lambda command: "") == "12"
