"""Runs on samples of different sizes: the same samples per step and the same weights on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import write_ragged

COUNT = 50
PROGRAM = """
import json, sys
import torch
import hpctrain
from hpctrain.data import Padding, RaggedDataset

folder, halt, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with hpctrain.init(device="cpu") as job:
    torch.manual_seed(0)
    dataset = RaggedDataset("part-*.h5", comm=job.comm)
    options = {"lengths": dataset.lengths("x")} if kind != "plain" else {}
    options |= {"most": 40} if kind == "most" else {}
    loader = job.loader(dataset, batch=8, seed=3, collate_fn=Padding(), **options)
    model = job.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, losses = {}, {}
    with job.run(model, optimizer, loader, checkpoints=folder, every=4, steps=halt or None) as run:
        for _ in run.epochs(2):
            for step, batch in run:
                def compute(part):
                    present = torch.arange(part["x"].shape[1]) < part["x_lengths"][:, None]
                    means = (model(part["x"])[..., 0] * present).sum(1) / part["x_lengths"]
                    return (means - part["target"]).square().mean()

                loss = run.backward(batch, compute)
                optimizer.step()
                optimizer.zero_grad()
                seen[step], losses[step] = batch["number"].tolist() if run.sample_weight else [], float(loss)
                if step == halt:
                    break
    everyone = job.comm.all_gather_object(seen)
    if job.rank == 0:
        found = {step: sorted(number for each in everyone for number in each[step]) for step in seen}
        print(json.dumps({"seen": found, "losses": losses, "weight": model.weight.tolist()}), flush=True)
"""


@pytest.fixture
def parts(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    samples = [
        {
            "x": draw.normal(size=(1 + number % 9, 2)).astype(np.float32),
            "target": np.float32(number % 3),
            "number": number,
        }
        for number in range(COUNT)
    ]
    write_ragged(tmp_path / "part-0.h5", train=samples[:21])
    write_ragged(tmp_path / "part-1.h5", train=samples[21:])


def result_of(job: Any) -> dict[str, Any]:
    assert job.returncode == 0, job
    found: dict[str, Any] = json.loads(job.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.limit(180)
@pytest.mark.parametrize(
    "kind", ("most", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("lengths", "plain")))
)
def test_a_run_resumes_on_another_number_of_ranks(launch: Any, parts: None, kind: str) -> None:
    whole = result_of(launch(1, PROGRAM, "whole", "0", kind))
    steps = sorted(map(int, whole["seen"]))
    assert steps == list(range(1, len(steps) + 1)) and len(steps) % 2 == 0
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]) if kind != "most" else (steps,):
        times = 2 if kind == "most" else 1
        assert sorted(number for step in epoch for number in whole["seen"][str(step)]) == sorted(
            [*range(COUNT)] * times
        )
    first = result_of(launch(3, PROGRAM, "cut", "5", kind))
    rest = result_of(launch(2, PROGRAM, "cut", "0", kind))
    assert {**first["seen"], **rest["seen"]} == whole["seen"]
    assert np.allclose(list({**first["losses"], **rest["losses"]}.values()), list(whole["losses"].values()), rtol=1e-5)
    assert np.allclose(rest["weight"], whole["weight"], rtol=1e-5)


CONFIG = """
[data]
files = ["part-*.h5"]
format = "ragged"
inputs = "x"
targets = "number"
prefetch = PREFETCH
[model]
name = "mlp"
options = { hidden = [8] }
[train]
steps = 6
batch = 12
evaluate_every = 0
[run]
device = "cpu"
"""


@pytest.mark.limit(120)
def test_hpctrain_train_reads_ragged_files(launch: Any, tmp_path: Path) -> None:
    for number in range(3):  # each file needs a validation split
        samples = [{"x": np.ones((2 + number, 2), np.float32), "target": np.float32(1), "number": number}] * 2
        write_ragged(tmp_path / f"part-{number}.h5", train=samples * 20, validation=samples)
    losses = []
    for ranks, prefetch in ((1, 0), (2, 2)):
        (tmp_path / "a.toml").write_text(CONFIG.replace("PREFETCH", str(prefetch)))
        words = ["train", "a.toml", "--set", f"run.folder=run{ranks}"]
        program = f"from hpctrain.cli.main import main; raise SystemExit(main({words}))"
        result = launch(ranks, program)
        assert result.returncode == 0, result
        rows = [json.loads(line) for line in (tmp_path / f"run{ranks}" / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert len(losses[0]) == 6 and np.allclose(*losses, rtol=1e-5)
