"""Commands and programs of the guides docs/reading-checkpoints.md and docs/tuning.md: each is run as it is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Eight steps with a checkpoint after each fourth; the model is that of the program on the page.
TRAINING = """
import torch, hpctrain
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
with hpctrain.init() as job:
    model = job.wrap(model)
    loader = torch.utils.data.DataLoader(data, 8)
    with job.run(model, optimizer, loader, checkpoints="runs/my", every=4, keep_best="loss") as run:
        for step, (x, y) in run:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
"""


def commands(page: str) -> list[str]:
    """Return the commands of a page: its indented lines."""
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^    (\S.*)$", text, re.MULTILINE)


def shell(folder: Path, command: str) -> Any:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )


@pytest.fixture
def trained(launch: Any, tmp_path: Path) -> Path:
    done = launch(0, TRAINING, cwd=tmp_path)
    assert done.returncode == 0, done
    return tmp_path


@pytest.mark.limit(120)
def test_checkpoints_are_read_as_the_guide_says(trained: Path) -> None:
    seen = set()
    for command in commands("reading-checkpoints.md"):
        if command.startswith("h5ls") and shutil.which("h5ls") is None:
            continue
        done = shell(trained, command)
        seen.add(" ".join(command.split()[:3]))
        expected = 1 if command.startswith("hpctrain checkpoint diff") else 0  # four steps apart
        assert done.returncode == expected, (command, done.stdout, done.stderr)
    assert {f"hpctrain checkpoint {action}" for action in ("ls", "show", "verify", "diff", "export", "plot")} <= seen
    assert (trained / "my.safetensors").exists() and (trained / "curves.png").exists()
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "reading-checkpoints.md").read_text(), re.M | re.S)
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=trained, capture_output=True, text=True)
        assert done.returncode == 0, (block, done.stderr)
    assert len(blocks) == 2


@pytest.mark.limit(120)
def test_a_run_is_tuned_as_the_guide_says(trained: Path) -> None:
    (trained / "my.toml").write_text('[run]\nfolder = "runs/my"\n')
    (trained / "runs" / "scaling").mkdir()
    shutil.copytree(trained / "runs" / "my", trained / "runs" / "scaling" / "one")
    asked = commands("tuning.md")
    assert [command.split()[1] for command in asked] == ["doctor", "watch", "report", "plan", "report"]
    for command in asked[1:]:  # the doctor measures this machine, and may find something
        done = shell(trained, command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert (trained / "scaling.html").exists()
