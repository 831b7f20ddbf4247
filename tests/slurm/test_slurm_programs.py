"""Programs written for torch.distributed, started by ``hpctrain run`` in jobs of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_jobs import Submitter
from support.jobs import JobStarter

pytestmark = pytest.mark.slurm
STEPS = 40
# A program for torchrun with a loop of its own. A rank kills itself once, if the first argument is a step.
PROGRAM = """
import hashlib, os, pathlib, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from hpctrain.integrations.program_run import ProgramRun

folder, fault = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(5 + dist.get_rank())
first = not pathlib.Path(folder, "checkpoints").exists()
with ProgramRun(folder, model, optimizer, every=5) as run:
    for step in range(run.step + 1, %d):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if first and step == fault and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.end_step()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
if dist.get_rank() == 0:
    print("ranks", dist.get_world_size(), "nodes", int(os.environ["GROUP_WORLD_SIZE"]), "digest", digest, flush=True)
dist.destroy_process_group()
""" % (STEPS + 1)


@pytest.mark.limit(260)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_program_whose_rank_was_killed_resumes(
    submitter: Submitter, launch: JobStarter, tmp_path: Path, mpi: str
) -> None:
    Path(submitter.folder, "train.py").write_text(PROGRAM)
    job = submitter.submit(mpi=mpi, program=["train.py", "run", "23"])
    assert job.until_over(150) == "COMPLETED"
    assert job.restarts == 1 and job.steps == list(range(1, STEPS + 1))
    assert job.attempts[1]["first_step"] == 21
    whole = launch(2, "-m", "hpctrain", "run", str(submitter.folder / "train.py"), str(tmp_path / "whole"), "0")
    digest = whole.stdout.split()[-1]
    assert f"ranks 2 nodes 2 digest {digest}" in job.output and whole.returncode == 0
