"""Runs with pipelines and tensor parallelism continue with whole replicas when ranks have died."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tolerance import TOLERANT, needs_tolerance

STEPS = 10
PROGRAM = """
import os, signal, sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import hpctrain

kind, folder = sys.argv[1:3]
deaths = [death.split(":") for death in sys.argv[3:]]  # rank:step:place
job = hpctrain.init(parallel={kind.split()[0]: 2})
number, now, called = job.rank, [0], [0]


def die(place):
    if [str(number), str(now[0]), place] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    tensor_plan = {"blocks.*.0": "column", "blocks.*.2": "row"}

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(32, 16)
        self.head.weight = self.embedding.weight

    def layers(self):
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens):
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        return self.head(values)


def compute(part):
    logits = model(part[0])
    called[0] += 1  # with a pipeline: microbatches of the last stage
    die("inside" if called[0] == 1 else f"part {called[0]}")
    return cross_entropy(logits.flatten(0, 1), part[1].flatten())


torch.manual_seed(0)
model = job.wrap(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
draw = torch.Generator().manual_seed(1)
tokens = [torch.randint(0, 16, (96, 5), generator=draw) for _ in range(2)]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tokens), batch_size=16, shuffle=True)
with job.run(model, optimizer, loader, checkpoints=folder, every=4, on_failure="shrink", steps=10) as run:
    for now[0], batch in run:
        called[0] = 0
        loss = run.backward(batch, compute)
        die("backward")
        if "unclipped" not in kind:
            run.clip(1.0)
        optimizer.step()
        die("update")
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss=loss)
    measured = run.evaluate(loader, compute)
if job.rank == 0:
    print("measured", float(measured))
print("rank", number, "is now", job.rank, "of", job.size, flush=True)
"""


def run(launch: Any, folder: Path, kind: str, *deaths: str, ranks: int = 4) -> tuple[Any, list[float]]:
    """Return the result of the job, and the losses of its steps and of an evaluation at the end."""
    result = launch(ranks, PROGRAM, kind, folder, *deaths, options=TOLERANT, timeout=100)
    assert result.returncode == 0 and not result.survivors, result
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), result
    assert result.stdout.count("is now") == ranks - 2 * len(deaths), result
    measured = re.search(r"measured ([0-9.]+)", result.stdout)
    assert measured, result
    return result, [*(row["loss"] for row in rows), float(measured[1])]


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "kind, deaths, ranks",
    [
        ("pipe unclipped", ("3:4:part 4",), 4),  # the first stage has gradients of the first microbatches
        ("tensor", ("0:5:update",), 4),
        pytest.param("pipe", ("3:4:inside",), 4, marks=pytest.mark.long),
        pytest.param("pipe", ("0:1:backward",), 4, marks=pytest.mark.long),
        pytest.param("pipe", ("4:3:inside", "0:7:update"), 6, marks=pytest.mark.long),
        pytest.param("tensor", ("2:10:backward",), 4, marks=pytest.mark.long),
    ],
)
def test_whole_replicas_continue_with_the_same_batches(
    launch: Any, tmp_path: Path, kind: str, deaths: tuple[str, ...], ranks: int
) -> None:
    wanted = run(launch, tmp_path / "plain", kind, ranks=ranks)[1]
    result, found = run(launch, tmp_path / "run", kind, *deaths, ranks=ranks)
    assert found == pytest.approx(wanted, rel=1e-4)
    pattern = r"warning: rank \d on \S+ has died and 1 rank of the same replica left in step \d+: \d ranks continue"
    assert len(re.findall(pattern, result.stderr)) == len(deaths), result
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert [len(recovery["left"]) for recovery in attempt["recoveries"]] == [1] * len(deaths)
    assert [len(recovery["ranks"]) for recovery in attempt["recoveries"]] == [2] * len(deaths)
    shown = launch(0, "-m", "hpctrain", "receipt", tmp_path / "run")
    pattern = r"died: rank \d on \S+ in step \d+ \(rank \d on \S+ of the same replica left\), continued with \d ranks"
    assert len(re.findall(pattern, shown.stdout)) == len(deaths), shown


@needs_tolerance
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "deaths",
    [
        ("0:3:backward", "3:3:inside"),
        pytest.param(("0:3:backward", "1:5:update"), marks=pytest.mark.long),  # one rank is left, which reports it
    ],
)
def test_without_a_whole_replica_the_job_ends(launch: Any, tmp_path: Path, deaths: tuple[str, ...]) -> None:
    result = launch(4, PROGRAM, "pipe", tmp_path, *deaths, options=TOLERANT, timeout=60)
    assert result.returncode == 1 and not result.survivors, result
    assert re.search(
        r"no replica of the model is left whose ranks all live, because ranks 0 on \S+", result.stderr
    ), result
    assert "Traceback" not in result.stderr, result
