"""Submission: the job of --after, warnings about limits of PBS, the environment, and the history of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes.schedulers import Batch

from hpctrain.errors import UsageError
from hpctrain.jobs.submit import clean, history, job_to_wait_for, pbs_warnings, record, submit


def test_variables_that_sbatch_reads_are_removed() -> None:
    names = "ACCOUNT ARRAY_INX CONSTRAINT EXCLUSIVE EXPORT GPUS MEM_PER_NODE NO_REQUEUE PARTITION QOS SIGNAL TIMELIMIT"
    environment = {f"SBATCH_{name}": "x" for name in names.split()} | {"SLURM_HINT": "x", "SLURM_EXIT_ERROR": "9"}
    environment["A"] = "b"
    kept, removed = clean(environment)
    assert kept == {"A": "b"} and len(removed) == len(environment) - 1


# The history of submissions -------------------------------------------------------------------------------------------


def test_concurrent_submissions_are_all_recorded(tmp_path: Path) -> None:
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda number: record(tmp_path, {"job_id": str(number), "command": ["x" * 2000]}), range(40)))
    assert sorted(int(one["job_id"]) for one in history(tmp_path)) == list(range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.json"]


def test_a_history_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    assert history(tmp_path) == []
    (tmp_path / "jobs.json").write_text(json.dumps([{"job_id": "1"}, {"job_id": "2"}], indent=2) + "\n")
    record(tmp_path, {"job_id": "3"})
    record(tmp_path, {"job_id": "4"})
    assert [one["job_id"] for one in history(tmp_path)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ['{"job_id": "1"', "[1]", "\x00", '{"job_id": "1"}\n{"jo', "[" * 100_000])
def test_a_damaged_history_is_moved_aside(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(UsageError, match="jobs.json is damaged"):
        history(tmp_path)
    record(tmp_path, {"job_id": "3"})
    assert [one["job_id"] for one in history(tmp_path)] == ["3"]
    (aside,) = tmp_path.glob("jobs.json.damaged-*")
    assert aside.read_text() == text and aside.name in caplog.text


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_history_that_is_not_a_file_is_refused_before_submission(tmp_path: Path, kind: str) -> None:
    batch = Batch(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "precious").write_text("keep me")
    if kind == "link":
        (folder / "jobs.json").symlink_to(tmp_path / "precious")
    else:
        os.mkfifo(folder / "jobs.json")
    with pytest.raises(UsageError, match="cannot record a job in .*jobs.json"):
        submit("slurm", "x", folder, environ=batch.environment())
    assert not batch.calls() and (tmp_path / "precious").read_text() == "keep me"


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


def pbs_server_facts(server: dict[str, Any], queue: dict[str, Any]) -> Any:
    def ask(command: Sequence[str]) -> str:
        if "-B" in command:
            return json.dumps({"pbs_version": "23", "Server": {"h": {"default_queue": "workq", **server}}})
        return json.dumps({"pbs_version": "23", "Queue": {command[-1]: queue}})

    return ask


FLAT = {"flatuid": "True"}


@pytest.mark.parametrize(
    "seconds, queue, told", [(9.0, {}, False), (11.0, {}, True), (11.0, {"kill_delay": 60}, False)]
)
def test_saves_longer_than_kill_delay_are_warned_about(seconds: float, queue: dict[str, Any], told: bool) -> None:
    found = pbs_warnings("", "runs/a", seconds, pbs_server_facts(FLAT, queue))
    if told:
        (text,) = found
        assert "has taken 11.0 s, and qdel leaves 10 s (kill_delay of queue workq)" in text
        assert text.endswith("touch runs/a/STOP")
    else:
        assert found == []


def test_a_server_that_refuses_submission_by_jobs_is_warned_about() -> None:
    (text,) = pbs_warnings("q", "runs/a", 0.0, pbs_server_facts({}, {}))
    assert "flatuid is not set" in text and "runs/a/output.txt" in text


def test_without_pbs_there_is_no_warning() -> None:
    assert pbs_warnings("", "runs/a", 99.0, lambda command: "") == []
