"""Preflight under Slurm: all ranks that srun started measure the nodes of a job before training starts."""

from __future__ import annotations

import json

import pytest
from batch_jobs import Submitter

pytestmark = pytest.mark.slurm


@pytest.mark.limit(240)
def test_a_job_measures_its_nodes_and_trains_on_good_ones(submitter: Submitter) -> None:
    job = submitter.submit("--preflight", "5")
    state = job.until_over(200)
    found = json.loads((job.folder / "preflight.json").read_text())
    # hostname(1) on the nodes prints the same names.
    assert found["hosts"] == sorted(submitter.slurm.command("srun", "--nodes=2", "hostname").split()), job.told()
    assert len(found["ranks"]) == 2 and all(rank["flops"] > 0 for rank in found["ranks"])
    # Both nodes are on one machine that other processes use, too: either outcome is possible.
    if any(finding["level"] in ("warning", "error") for finding in found["findings"]):
        assert state == "FAILED" and job.exit_code == 1 and job.restarts == 0 and not job.attempts, job.told()
    else:
        assert state == "COMPLETED" and len(job.attempts) == 1, job.told()
