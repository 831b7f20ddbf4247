"""The job of a program: its ranks are those of the launcher and of torch.distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.integrations.program_run import ProgramRun
from hpctrain.train.exit import LeavingTogether


@pytest.mark.ranks(2)
def test_ranks_without_a_process_group_are_told_to_make_one(folder: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="started 2 ranks, and torch.distributed has no process group: call torch"):
        ProgramRun(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ProgramRun(tmp_path, model, optimizer) as run:
        run.end_step(loss=1.0)
        (tmp_path / "SAVE").touch()
        assert run.save().name == "step_00000001.h5"
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(LeavingTogether):
        with ProgramRun(tmp_path, model, optimizer, walltime="1s", margin=9.0) as run:
            assert run.step == 1 and torch.equal(model.weight, before)
            run.end_step(loss=1.0)
    assert run.step == 2 and run.stopped_by is not None and "the job ends at" in run.stopped_by
