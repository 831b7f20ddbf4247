"""Failures under OpenPBS: after a dead rank, pbs_mom or node the chain continues to the bits of a plain run."""

from __future__ import annotations

import re
import time

import pytest
from pbs_jobs import PbsSubmitter
from support.paced_runs import STEPS

pytestmark = pytest.mark.pbs
SOON = 20.0  # seconds from the failure until no rank is left
BOTH = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])


@BOTH
@pytest.mark.limit(240)
def test_a_chain_continues_after_a_killed_rank(submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str) -> None:
    job = submitter.submit("--set", "checkpoint.every=20", nodes=2, mpi=mpi, HARM="kill 1 30")
    job.until(lambda: (submitter.folder / "harm.txt").exists(), "harm", 60)
    job.until_link(2, SOON)
    assert time.time() - submitter.harmed < SOON
    assert job.until_over(90) == 0
    assert [attempt["first_step"] for attempt in job.attempts] == [1, 21]
    assert job.attempts[0]["status"] in ("killed", "failed") and job.attempts[1]["status"] == "finished"
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.limit(300)
def test_a_job_with_a_dead_node_is_restarted_on_other_nodes(
    lone_submitter: PbsSubmitter, reference: dict[str, bytes]
) -> None:
    """PBS restarts the job itself, under the same id, on other nodes."""
    job = lone_submitter.submit("--set", "checkpoint.every=20", "--ranks-per-node", "2", PACE="0.1")
    job.until_step(25)
    (dead,) = job.nodes
    lone_submitter.cluster.kill_node(dead)
    job.until(lambda: job.facts.get("run_count", 0) >= 2 and job.nodes not in ([], [dead]), "its second start", 120)
    job.hurry()
    assert job.until_over(90) == 0
    assert job.links == [job.id] and dead not in job.nodes
    assert [attempt["status"] for attempt in job.attempts] == ["killed", "finished"]
    assert job.attempts[1]["first_step"] in (21, 41)  # after a checkpoint; a busy machine kills the node later
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.long
@pytest.mark.limit(300)
def test_a_job_with_a_killed_mom_is_restarted_elsewhere(
    lone_submitter: PbsSubmitter, reference: dict[str, bytes]
) -> None:
    """The processes of the job survive, so two copies of it may run when PBS starts it elsewhere."""
    job = lone_submitter.submit("--set", "checkpoint.every=20", "--ranks-per-node", "2", PACE="0.1")
    job.until_step(25)
    (first,) = job.nodes
    lone_submitter.cluster.kill_mom(first)
    job.until(lambda: job.facts.get("run_count", 0) >= 2 and job.nodes not in ([], [first]), "its second start", 120)
    job.until_over(120)
    assert job.exit_code == 0
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@BOTH
@pytest.mark.limit(300)
def test_a_dead_node_is_replaced_by_a_spare_one(
    lone_submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str
) -> None:
    """The job keeps its id and does not queue: its script starts the run again on the nodes that answer."""
    words = ("--spares", "1", "--set", "checkpoint.every=20", "--ranks-per-node", "1")
    job = lone_submitter.submit(*words, nodes=2, mpi=mpi, PACE="0.2")
    job.until_step(25)
    first, dead, spare = job.nodes
    lone_submitter.cluster.kill_node(dead)
    again = re.compile(rf"starts again on {first}\S* {spare}\S* .exit code")
    job.until(lambda: again.search(job.output), "its second start", 120)
    job.hurry()
    assert job.until_over(90) == 0
    assert job.links == [job.id] and job.facts["run_count"] == 1
    one, two = job.attempts
    assert (one["spare_nodes"], two.get("spare_nodes")) == (1, None)
    assert (one["nodes"], two["nodes"]) == (2, 2) and two["first_step"] in (21, 41)
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
