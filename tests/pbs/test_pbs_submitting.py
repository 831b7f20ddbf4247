"""What hpctrain says of jobs under OpenPBS: when they are submitted, when they wait, when they have ended."""

from __future__ import annotations

import json

import pytest
from pbs_cluster import give
from pbs_jobs import PbsDesk, PbsJob

pytestmark = pytest.mark.pbs


@pytest.mark.limit(120)
def test_after_a_job_that_pbs_cannot_wait_for(desk: PbsDesk) -> None:
    with pytest.raises(RuntimeError, match="--after 99999: PBS knows no such job"):
        desk.submit("--after", "99999")
    with pytest.raises(RuntimeError, match=r"--after 1\[\]: tasks of a PBS array come back as jobs of their own"):
        desk.submit("--after", "1[]")
    assert not (desk.folder / "run").exists(), "nothing was written"
    # The negative: qsub takes the unknown job and prints an id, and PBS then drops the new one without running it.
    taken = desk.cluster.login("qsub -W depend=afterany:99999 -- /bin/true").strip()
    desk.cluster.until(lambda: desk.cluster.job(taken).get("job_state") == "F", "the end of what waits", 20)
    assert "stime" not in desk.cluster.job(taken)


@pytest.mark.limit(150)
def test_the_receipt_of_a_killed_job(desk: PbsDesk) -> None:
    job = desk.submit(PACE="0.2")
    job.until_step(5)
    assert _status(desk) == "running"
    # The script and all ranks at once: what is left is a receipt that says "running", and the lock of another host.
    (node,) = job.nodes
    desk.cluster.on(node, f"kill -KILL {' '.join(map(str, desk.cluster.processes(node, job.id)))}", check=True)
    job.until(lambda: job.facts.get("job_state") == "F", "its end", 30)
    assert _status(desk) == "killed"


@pytest.mark.limit(200)
def test_a_job_that_may_not_submit_itself(lone_desk: PbsDesk) -> None:
    cluster = lone_desk.cluster
    cluster.root("qmgr -c 'set server flatuid = False'")
    try:
        job = lone_desk.submit("--ranks-per-node", "2", PACE="0.2")
        (warning,) = json.loads(lone_desk.told)["warnings"]
        assert "this PBS lets no job submit jobs (flatuid is not set)" in warning
        found = json.loads(lone_desk.hpctrain("doctor", "--json", check=False))["findings"]
        (said,) = [one for one in found if one["topic"] == "PBS" and one["level"] == "warning"]
        assert "flatuid" in said["found"]
        job.until_step(5)
        job.remind()
        assert job.until_over(60) == 75
        assert "qsub failed: qsub: Bad UID for job execution" in job.output
        (command,) = [line.strip() for line in job.output.splitlines() if line.startswith("  cd ")]
        again = PbsJob(cluster, cluster.login(command).strip(), job.script, job.folder)
        lone_desk.jobs.append(again)
        assert again.id != job.id
        again.until(lambda: again.facts["job_state"] == "F", "the end of the second", 90)
        assert again.facts["Exit_status"] == 0
        assert [attempt["status"] for attempt in job.attempts] == ["stopped", "finished"]
    finally:
        cluster.root("qmgr -c 'set server flatuid = True'")


@pytest.mark.limit(90)
def test_a_save_that_takes_longer_than_qdel_waits(lone_desk: PbsDesk) -> None:
    attempt = {"status": "stopped", "first_step": 1, "step": 5, "last_save_seconds": 12.5}
    (lone_desk.folder / "run").mkdir()
    (lone_desk.folder / "run/run.json").write_text(json.dumps({"status": "stopped", "attempts": [attempt]}))
    give(lone_desk.folder)
    lone_desk.submit("--directive=-h")
    (warning,) = json.loads(lone_desk.told)["warnings"]
    assert "has taken 12.5 s, and qdel leaves 10 s (kill_delay of queue workq)" in warning
    lone_desk.cluster.root("qmgr -c 'set queue workq kill_delay = 30'")
    try:
        lone_desk.submit("--directive=-h")
        assert json.loads(lone_desk.told)["warnings"] == []
    finally:
        lone_desk.cluster.root("qmgr -c 'unset queue workq kill_delay'")


def _status(desk: PbsDesk) -> str:
    (run,) = json.loads(desk.hpctrain("receipt", "run", "--json"))["runs"]
    return str(run["status"])
