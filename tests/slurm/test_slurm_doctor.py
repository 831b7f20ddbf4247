"""Preflight measures the nodes of a job, with all ranks that srun started, before anything is computed."""

from __future__ import annotations

import json

import pytest
from batch_jobs import Desk

pytestmark = pytest.mark.slurm


@pytest.mark.limit(240)
def test_a_job_measures_its_nodes_and_trains_on_good_ones(desk: Desk) -> None:
    job = desk.submit("--preflight", "5")
    state = job.until_over(200)
    found = json.loads((job.folder / "preflight.json").read_text())
    # hostname(1) of the nodes says the same.
    assert found["hosts"] == sorted(desk.slurm.command("srun", "--nodes=2", "hostname").split()), job.told()
    assert len(found["ranks"]) == 2 and all(rank["flops"] > 0 for rank in found["ranks"])
    # Both nodes are played by one machine that others use, too: which of the two it comes to is chance.
    if any(finding["level"] in ("warning", "error") for finding in found["findings"]):
        assert state == "FAILED" and job.exit_code == 1 and job.restarts == 0 and not job.attempts, job.told()
    else:
        assert state == "COMPLETED" and len(job.attempts) == 1, job.told()
