"""Submission: the job of --after, warnings about limits of PBS, the environment, and the history of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.batch import Batch

from hpctrain.errors import HpctrainError, LaunchError, UsageError
from hpctrain.jobs import submit as submitting
from hpctrain.jobs.submit import clean, history, job_to_wait_for, pbs_warnings, record, submit


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    batch = Batch(tmp_path)
    batch.does("sbatch", "echo 1234")
    batch.does("qsub", "echo 77.server")
    return batch


def test_a_script_is_written_submitted_and_recorded(batch: Batch, tmp_path: Path) -> None:
    folder = tmp_path / "runs/a b"
    environment = batch.environment(SBATCH_PARTITION="other", SLURM_CONF="/x", SLURM_MEM_PER_CPU="9", TEST_A="1")
    done = submit("slurm", "#!/bin/bash\n", folder, environ=environment)
    assert (done.job_id, done.script) == ("1234", folder / "job.sbatch")
    assert done.script.read_text() == "#!/bin/bash\n" and os.access(done.script, os.X_OK)
    (call,) = batch.calls("sbatch")
    assert call.words == ["--parsable", str(done.script)]
    assert done.removed == ("SBATCH_PARTITION", "SLURM_MEM_PER_CPU")
    assert not set(done.removed) & call.environment.keys()
    assert (call.environment["SLURM_CONF"], call.environment["TEST_A"]) == ("/x", "1")
    entry = json.loads((folder / "jobs.json").read_text())
    assert entry["job_id"] == "1234" and entry["environment_removed"] == list(done.removed) and entry["submitted"]
    submit("slurm", "#!/bin/sh\n", folder, after="1234", environ=environment)
    assert batch.calls("sbatch")[1].words == ["--parsable", "--dependency=afterany:1234", str(done.script)]
    assert len(history(folder)) == 2 and history(folder)[0] == entry
    assert sorted(path.name for path in folder.iterdir()) == ["job.sbatch", "jobs.json"]


def test_pbs_jobs_are_submitted_with_their_dependency(batch: Batch, tmp_path: Path) -> None:
    outer = {"PBS_DPREFIX": "#X", "PBS_SERVER": "s", "PBS_JOBID": "3", "PBS_NODEFILE": "/x"}
    outer["OMPI_COMM_WORLD_SIZE"] = "2"
    outer |= {"HPCTRAIN_CHAIN": "3.server", "HPCTRAIN_TASK": "1", "HPCTRAIN_DEADLINE": "9", "HPCTRAIN_TIMEOUT": "60"}
    done = submit("pbs", "#!/bin/bash\n", tmp_path, after="12.server", environ=batch.environment(**outer))
    (call,) = batch.calls("qsub")
    assert call.words == ["-W", "depend=afterany:12.server", str(tmp_path / "job.pbs")]
    assert done.job_id == "77.server" and call.environment["PBS_SERVER"] == "s"
    chain = ("HPCTRAIN_CHAIN", "HPCTRAIN_DEADLINE", "HPCTRAIN_TASK")
    assert done.removed == (*chain, "OMPI_COMM_WORLD_SIZE", "PBS_DPREFIX", "PBS_JOBID", "PBS_NODEFILE")


def test_variables_that_sbatch_reads_are_removed() -> None:
    names = "ACCOUNT ARRAY_INX CONSTRAINT EXCLUSIVE EXPORT GPUS MEM_PER_NODE NO_REQUEUE PARTITION QOS SIGNAL TIMELIMIT"
    environment = {f"SBATCH_{name}": "x" for name in names.split()} | {"SLURM_HINT": "x", "SLURM_EXIT_ERROR": "9"}
    environment["A"] = "b"
    kept, removed = clean(environment)
    assert kept == {"A": "b"} and len(removed) == len(environment) - 1


@pytest.mark.parametrize(
    "printed, job_id",
    [("1234;cluster", "1234"), ("1234[].server", "1234[].server"), ("12", "12"), ("a warning\n99\n", "99")],
)
def test_job_ids_are_parsed(batch: Batch, tmp_path: Path, printed: str, job_id: str) -> None:
    batch.does("sbatch", f"printf '%s' '{printed}'")
    assert submit("slurm", "x", tmp_path, environ=batch.environment()).job_id == job_id


@pytest.mark.parametrize(
    "does, message",
    [
        ("echo 'Invalid account' >&2; exit 1", r"sbatch --parsable .* failed \(exit code 1\): Invalid account"),
        ("exit 0", "sbatch printed no job id: it printed nothing"),
        ("echo 'all well'", "sbatch printed no job id: all well"),
    ],
)
def test_errors_of_the_scheduler_are_quoted(batch: Batch, tmp_path: Path, does: str, message: str) -> None:
    batch.does("sbatch", does)
    with pytest.raises(LaunchError, match=message):
        submit("slurm", "x", tmp_path / "run", environ=batch.environment())
    assert not (tmp_path / "run/jobs.json").exists()


def test_a_missing_scheduler_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no qsub here: submit from a login node"):
        submit("pbs", "x", tmp_path, environ={"PATH": str(tmp_path)})


def test_a_scheduler_timeout_is_an_error(batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "TIMEOUT", 0.2)
    batch.does("sbatch", "exec /bin/sleep 20")
    with pytest.raises(LaunchError, match="sbatch has not answered for 0.2 s"):
        submit("slurm", "x", tmp_path, environ=batch.environment())


@pytest.mark.parametrize("after", ["1;canary", "-1", "$(canary)", "1\n", "x"])
def test_after_must_be_a_job_id(batch: Batch, tmp_path: Path, after: str) -> None:
    with pytest.raises(UsageError, match="--after .* is not the id of a job"):
        submit("slurm", "x", tmp_path / "run", after=after, environ=batch.environment())
    assert not batch.calls() and not (tmp_path / "run").exists()


def test_an_unwritable_folder_is_refused_before_submission(batch: Batch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write .*job.sbatch"):
        submit("slurm", "x", tmp_path / "file", environ=batch.environment())
    assert not batch.calls()


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
def test_a_history_that_is_not_a_file_is_refused_before_submission(batch: Batch, tmp_path: Path, kind: str) -> None:
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


def test_the_job_id_is_reported_if_recording_fails(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr(submitting, "record", fail)
    with pytest.raises(HpctrainError, match="job 1234 is submitted, but cannot be recorded in .*: No space") as found:
        submit("slurm", "x", tmp_path, environ=batch.environment(), on_submitted=lambda done: told.append(done.job_id))
    assert told == ["1234"] and found.value.exit_code == 1


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
