"""A job that is told to save does; a chain of jobs ends with the bits of a run that nothing disturbed."""

from __future__ import annotations

import pytest
from pbs_jobs import PbsDesk
from support.paced_runs import EVERY

pytestmark = pytest.mark.pbs
PACE = "0.2"  # so that 300 steps take a minute, and a job is told to save before it ends by itself


@pytest.mark.parametrize("mpi, nodes", [("mpich", 2), ("openmpi", 2), ("openmpi", 1), ("mpich", 1)])
@pytest.mark.limit(180)
def test_qdel_saves_and_ends_the_chain(desk: PbsDesk, mpi: str, nodes: int) -> None:
    job = desk.submit("--ranks-per-node", str(2 // nodes), nodes=nodes, mpi=mpi, PACE=PACE)
    job.until_step(5)
    hosts = job.nodes
    desk.cluster.login(f"qdel {job.id}")
    job.until_over(45)
    assert job.how_attempts_ended == [("stopped", "a signal")]
    step = job.attempts[0]["step"]
    assert step % EVERY and job.checkpoints == [step]
    assert job.links == [job.id]
    for host in hosts:
        job.until(lambda: not desk.cluster.on(host, "pgrep -u pbsuser").strip(), f"no process left on {host}", 20)
