"""Examples of docs/torch-backend.md, run as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "torch-backend.md"


def test_the_checkpoint_of_the_example_is_read_by_one_process(launch: Any, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    launch(2, example, cwd=tmp_path)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = checkpoint.load(tmp_path / "runs/fsdp2/step_00000010.h5", model=model, optimizer=optimizer)
    assert loaded.train["step"] == 10
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (32, 8)
    assert optimizer.param_groups[0]["lr"] == 0.01
