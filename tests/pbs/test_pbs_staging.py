"""Jobs that copy data to two nodes before the ranks start."""

from __future__ import annotations

import pytest
from pbs_jobs import PbsSubmitter

pytestmark = pytest.mark.pbs


@pytest.mark.limit(200)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_two_nodes_train_on_copies(submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str) -> None:
    storage = submitter.folder / "storage"
    storage.mkdir()
    storage.chmod(0o777)  # jobs run as another user
    job = submitter.submit("--stage", "data", nodes=2, mpi=mpi, HPCTRAIN_STAGE_FOLDER=str(storage))
    assert job.until_over() == 0
    (attempt,) = job.attempts
    assert attempt["staged"].startswith("1 file on 2 nodes in ") and "without" not in attempt["staged"]
    (folder,) = storage.iterdir()
    assert not list(folder.iterdir()), "removed at the end"
    assert job.weights == reference
