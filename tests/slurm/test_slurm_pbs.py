"""PBS scripts under Slurm's PBS compatibility: sbatch reads the #PBS lines, and qsub is Slurm's wrapper."""

from __future__ import annotations

import pytest
from batch_jobs import Submitter
from support.paced_runs import STEPS

pytestmark = pytest.mark.slurm


@pytest.mark.limit(320)
def test_a_job_at_its_time_limit_submits_its_successor(pbs_submitter: Submitter, reference: dict[str, bytes]) -> None:
    profile = {"scheduler": "pbs", "launcher": "hydra", "gpus": "none"}
    job = pbs_submitter.submit("--set", "run.margin=5", profile=profile, time="00:02:00", margin=59, PACE="0.25")
    job.until_step(1)
    facts = pbs_submitter.slurm.job(job.id)
    assert (facts["NodeList"], facts["TimeLimit"]) == ("a[1-2]", "00:02:00")
    job.until(lambda: len(job.attempts) == 2 and job.attempts[1]["status"] != "running", "the second", 200)
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
