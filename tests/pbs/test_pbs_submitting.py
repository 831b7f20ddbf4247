"""Messages and warnings of hpctrain about OpenPBS jobs: at submission, while they wait, after they have ended."""

from __future__ import annotations

import json

import pytest
from pbs_cluster import give
from pbs_jobs import PbsJob, PbsSubmitter

pytestmark = pytest.mark.pbs


@pytest.mark.limit(120)
def test_after_refuses_jobs_that_pbs_cannot_wait_for(submitter: PbsSubmitter) -> None:
    with pytest.raises(RuntimeError, match="--after 99999: PBS knows no such job"):
        submitter.submit("--after", "99999")
    with pytest.raises(RuntimeError, match=r"--after 1\[\]: tasks of a PBS array restart as jobs of their own"):
        submitter.submit("--after", "1[]")
    assert not (submitter.folder / "run").exists(), "nothing was written"
    # The negative: qsub accepts the unknown job and prints an id, and PBS then drops the new job without running it.
    taken = submitter.cluster.login("qsub -W depend=afterany:99999 -- /bin/true").strip()
    submitter.cluster.until(lambda: submitter.cluster.job(taken).get("job_state") == "F", "the end of what waits", 20)
    assert "stime" not in submitter.cluster.job(taken)


@pytest.mark.limit(150)
def test_the_receipt_of_a_killed_job_says_killed(submitter: PbsSubmitter) -> None:
    job = submitter.submit(PACE="0.2")
    job.until_step(5)
    assert _status(submitter) == "running"
    # Kill the script and all ranks at once: a receipt that says "running" and the lock of another host remain.
    (node,) = job.nodes
    processes = " ".join(map(str, submitter.cluster.processes(node, job.id)))
    submitter.cluster.on(node, f"kill -KILL {processes}", check=True)
    job.until(lambda: job.facts.get("job_state") == "F", "its end", 30)
    assert _status(submitter) == "killed"


@pytest.mark.limit(200)
def test_a_server_that_refuses_submission_by_jobs_is_warned_about(lone_submitter: PbsSubmitter) -> None:
    cluster = lone_submitter.cluster
    cluster.root("qmgr -c 'set server flatuid = False'")
    try:
        job = lone_submitter.submit("--ranks-per-node", "2", PACE="0.2")
        (warning,) = json.loads(lone_submitter.told)["warnings"]
        assert "this PBS lets no job submit jobs (flatuid is not set)" in warning
        found = json.loads(lone_submitter.hpctrain("doctor", "--json", check=False))["findings"]
        (said,) = [one for one in found if one["topic"] == "PBS" and one["level"] == "warning"]
        assert "flatuid" in said["found"]
        job.until_step(5)
        job.remind()
        assert job.until_over(60) == 75
        assert "qsub failed: qsub: Bad UID for job execution" in job.output
        (command,) = [line.strip() for line in job.output.splitlines() if line.startswith("  cd ")]
        again = PbsJob(cluster, cluster.login(command).strip(), job.script, job.folder)
        lone_submitter.jobs.append(again)
        assert again.id != job.id
        again.until(lambda: again.facts["job_state"] == "F", "the end of the second", 90)
        assert again.facts["Exit_status"] == 0
        assert [attempt["status"] for attempt in job.attempts] == ["stopped", "finished"]
    finally:
        cluster.root("qmgr -c 'set server flatuid = True'")


@pytest.mark.limit(90)
def test_saves_longer_than_kill_delay_are_warned_about(lone_submitter: PbsSubmitter) -> None:
    attempt = {"status": "stopped", "first_step": 1, "step": 5, "last_save_seconds": 12.5}
    (lone_submitter.folder / "run").mkdir()
    (lone_submitter.folder / "run/run.json").write_text(json.dumps({"status": "stopped", "attempts": [attempt]}))
    give(lone_submitter.folder)
    lone_submitter.submit("--directive=-h")
    (warning,) = json.loads(lone_submitter.told)["warnings"]
    assert "has taken 12.5 s, and qdel leaves 10 s (kill_delay of queue workq)" in warning
    lone_submitter.cluster.root("qmgr -c 'set queue workq kill_delay = 30'")
    try:
        lone_submitter.submit("--directive=-h")
        assert json.loads(lone_submitter.told)["warnings"] == []
    finally:
        lone_submitter.cluster.root("qmgr -c 'unset queue workq kill_delay'")


def _status(submitter: PbsSubmitter) -> str:
    (run,) = json.loads(submitter.hpctrain("receipt", "run", "--json"))["runs"]
    return str(run["status"])
