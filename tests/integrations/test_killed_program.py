"""A program whose rank is killed resumes from its last checkpoint, and ends as one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.train.receipt.write import read_receipt

PROGRAM = """
import hashlib, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from hpctrain.integrations.program_run import ProgramRun

def train(folder, die_at=0):
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(5 + dist.get_rank())
    with ProgramRun(folder, model, optimizer, every=3) as run:
        for step in range(run.step + 1, 9):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == die_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.end_step()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()

dist.init_process_group("hpctrain")
digest = train("parts", int(sys.argv[1]))
if dist.get_rank() == 0:
    print("DIGESTS", digest, train("whole"), flush=True)
else:
    train("whole")
dist.destroy_process_group()
"""


@pytest.mark.limit(150)
def test_killed_program_resumes_from_its_last_checkpoint(launch: Any, tmp_path: Path) -> None:
    assert launch(2, PROGRAM, "5", cwd=tmp_path).returncode != 0
    job = launch(2, PROGRAM, "0", cwd=tmp_path)
    assert job.returncode == 0, str(job)
    parts, whole = next(line.split()[1:] for line in job.stdout.splitlines() if line.startswith("DIGESTS"))
    assert parts == whole
    rows = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 9))
    attempts = read_receipt(tmp_path / "parts")["attempts"]
    assert attempts[0]["status"] in ("killed", "failed") and attempts[1]["first_step"] == 4
