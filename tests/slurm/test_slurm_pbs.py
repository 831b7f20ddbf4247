"""Scripts for PBS, executed under Slurm's PBS compatibility: sbatch reads #PBS lines, and qsub is Slurm's."""

from __future__ import annotations

import pytest
from batch_jobs import Desk
from support.paced_runs import STEPS

pytestmark = pytest.mark.slurm


@pytest.mark.limit(320)
def test_a_job_submits_itself_again_when_its_time_is_over(pbs_desk: Desk, reference: dict[str, bytes]) -> None:
    profile = {"scheduler": "pbs", "launcher": "hydra", "gpus": "none"}
    job = pbs_desk.submit("--set", "run.margin=5", profile=profile, time="00:02:00", margin=59, PACE="0.25")
    job.until_step(1)
    facts = pbs_desk.slurm.job(job.id)
    assert (facts["NodeList"], facts["TimeLimit"]) == ("a[1-2]", "00:02:00")
    job.until(lambda: len(job.attempts) == 2 and job.attempts[1]["status"] != "running", "the second", 200)
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
