"""Jobs that copy data to the nodes before the ranks start."""

from __future__ import annotations

import pytest
from batch_jobs import Submitter

pytestmark = pytest.mark.slurm


@pytest.mark.limit(160)
@pytest.mark.parametrize(("mpi", "launcher"), [("mpich", "srun"), ("openmpi", "openmpi")])
def test_a_job_trains_on_copies_and_removes_them(
    submitter: Submitter, reference: dict[str, bytes], mpi: str, launcher: str
) -> None:
    storage = submitter.folder / "storage"
    storage.mkdir()
    job = submitter.submit(
        "--stage", "data", mpi=mpi, profile={"launcher": launcher}, HPCTRAIN_STAGE_FOLDER=str(storage)
    )
    assert job.until_over() == "COMPLETED"
    (attempt,) = job.attempts
    assert attempt["staged"].startswith("1 file on ") and "without" not in attempt["staged"]
    assert f"staged {attempt['staged']}" in job.output
    (folder,) = storage.iterdir()
    assert folder.name.startswith("hpctrain-stage-") and not list(folder.iterdir())
    assert job.weights == reference
