"""A script as people write it, under ``on_failure = "shrink"``: its numbers are those of plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tolerance import TOLERANT, needs_tolerance

STEPS = 30
# Plain PyTorch ("plain"), and the same with hpctrain; deaths are rank:step:place.
SCRIPT = '''
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy

mode, out = sys.argv[1], Path(sys.argv[2])
deaths = sys.argv[3:]


class Waves(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.waves = torch.randn(120, 1, 16, generator=draw)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return {"wave": self.waves[index], "label": (self.waves[index].sum() > 0).long()}


class Average:
    """Moving average of the weights."""

    def __init__(self, model):
        self.model = model
        self.mean = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self):
        for name, tensor in self.model.state_dict().items():
            self.mean[name].lerp_(tensor, 0.1)

    def state_dict(self):
        return {name: tensor.clone() for name, tensor in self.mean.items()}

    def load_state_dict(self, state):
        self.mean = {name: tensor.clone() for name, tensor in state.items()}


torch.manual_seed(11)
model = nn.Sequential(
    nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 2)
)
draw = torch.Generator().manual_seed(3)
loader = torch.utils.data.DataLoader(Waves(), batch_size=12, shuffle=True, generator=draw, num_workers=1)


def prepare(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40), Average(model)


def train_on(batch, die=lambda place: None):
    loss = cross_entropy(model(batch["wave"]), batch["label"])
    die("backward")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    die("optimizer")
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    average.update()
    die("end")
    return loss


def save(model, average):
    torch.save({"model": model.state_dict(), "average": average.mean, "rates": scheduler.get_last_lr()}, out / "end.pt")


if mode == "plain":
    optimizer, scheduler, average = prepare(model)
    losses = [train_on(batch).item() for epoch in range(3) for batch in loader]
    out.mkdir()
    save(model, average)
    (out / "losses.txt").write_text("\\n".join(map(str, losses)))
else:
    import hpctrain

    job = hpctrain.init()
    number = job.rank
    model = job.wrap(model)
    optimizer, scheduler, average = prepare(model)
    states = {"average": average}
    with job.run(model, optimizer, loader, checkpoints=out, every=7, states=states, on_failure="shrink") as run:
        for epoch in run.epochs(3):
            for step, batch in run:

                def die(place):
                    if f"{number}:{step}:{place}" in deaths:
                        os.kill(os.getpid(), signal.SIGKILL)

                run.log(loss=train_on(batch, die))
    if job.rank == 0:
        save(model, average)
'''


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the script's results without hpctrain."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    subprocess.run([sys.executable, "-c", SCRIPT, "plain", str(folder)], check=True, timeout=100)
    return folder


@needs_tolerance
@pytest.mark.limit(160)
@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param((), marks=pytest.mark.long),
        pytest.param(("2:9:backward",), marks=pytest.mark.long),
        ("0:7:optimizer", "1:20:end"),
        pytest.param(("1:30:end", "0:30:end"), marks=pytest.mark.long),
    ],
)
def test_losses_and_weights_are_those_of_plain_pytorch(
    launch: Any, tmp_path: Path, plain: Path, deaths: tuple[str, ...]
) -> None:
    result = launch(3, SCRIPT, "hpctrain", tmp_path / "run", *deaths, options=TOLERANT, timeout=100)
    assert result.returncode == 0 and not result.survivors, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    wanted = [float(line) for line in (plain / "losses.txt").read_text().splitlines()]
    complete = [number for number, row in enumerate(rows) if "lost_ranks" not in row]
    assert STEPS - len(complete) == len({death.split(":")[1] for death in deaths if "backward" not in death})
    losses = [rows[number]["loss"] for number in complete]
    assert losses == pytest.approx([wanted[number] for number in complete], rel=1e-4, abs=1e-6)
    found, expected = torch.load(tmp_path / "run" / "end.pt"), torch.load(plain / "end.pt")
    assert found["rates"] == pytest.approx(expected["rates"])
    for kind in ("model", "average"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(found[kind][name], tensor, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
