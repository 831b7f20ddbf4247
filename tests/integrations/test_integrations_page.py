"""Examples of docs/integrations.md, run as a reader would run them; those of libraries run in tests/ecosystem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain import checkpoint
from hpctrain.integrations.program_run import OPTIONS
from hpctrain.train.receipt.write import read_receipt

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_a_loop_of_your_own_writes_checkpoints_that_one_process_reads(launch: Any, tmp_path: Path) -> None:
    example = next(
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ProgramRun" in each
    )
    job = launch(2, example, cwd=tmp_path)
    assert job.returncode == 0, str(job)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = checkpoint.load(tmp_path / "runs/own/checkpoints/step_00000025.h5", model=model, optimizer=optimizer)
    assert loaded.step == 25 and len(loaded.train["curves"]["loss"]) == 25
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (32, 8)
    assert read_receipt(tmp_path / "runs/own")["status"] == "finished"


def test_page_lists_every_option() -> None:
    page = PAGE.read_text()
    assert [name for name in OPTIONS if f"`{name}`" not in page] == []
