"""Training under OpenPBS on one node and on two, with both MPIs, without ssh between the nodes."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from pbs_jobs import PbsSubmitter

pytestmark = pytest.mark.pbs
BOTH = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])


@BOTH
@pytest.mark.limit(180)
def test_one_node_trains(submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str) -> None:
    job = submitter.submit("--ranks-per-node", "2", mpi=mpi, SHOW="1")
    assert job.until_over() == 0
    (attempt,) = job.attempts
    assert (attempt["size"], attempt["nodes"], attempt["status"]) == (2, 1, "finished")
    assert job.weights == reference
    ranks = [json.loads((submitter.folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    cores = sorted(os.sched_getaffinity(0))
    job.until((job.folder / f"{job.id}.OU").exists, "PBS's own file in the run's folder", 20)
    # The job has both cores of its node, whatever this machine has: it binds ranks if those are all cores.
    assert [rank["cpus"] for rank in ranks] == ([[core] for core in cores] if len(cores) == 2 else [cores] * 2)


@BOTH
@pytest.mark.limit(200)
def test_two_nodes_train_without_ssh(submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str) -> None:
    job = submitter.submit(nodes=2, mpi=mpi, SHOW="two words; and $more")
    assert job.until_over() == 0
    (attempt,) = job.attempts
    assert (attempt["size"], attempt["nodes"], attempt["status"]) == (2, 2, "finished")
    assert job.weights == reference
    ranks = [json.loads((submitter.folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [rank["host"] for rank in ranks] == job.nodes and len(set(job.nodes)) == 2
    for rank in ranks:
        found = rank["environment"]
        assert found["SHOW"] == "two words; and $more" and found["HPCTRAIN_CHAIN"] == job.id == found["PBS_JOBID"]
        assert found["OMP_NUM_THREADS"] == "1" and float(found["HPCTRAIN_DEADLINE"]) > attempt["unix_time"]
        assert found["PATH"].startswith(f"{submitter.venvs[mpi]}/bin:")
        assert rank["cpus"] == sorted(os.sched_getaffinity(0)), "another job may share the node: not bound"
        assert rank["umask"] == 0o022, "as the folder of the run allows"
    if submitter.cluster.played:
        assert shutil.which("ssh", path="/usr/bin") and not submitter.cluster.on(job.nodes[0], "command -v ssh").strip()
