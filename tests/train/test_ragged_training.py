"""Runs on samples of different sizes: losses and weights of plain PyTorch, the same samples on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import write_ragged

COUNT = 50
PROGRAM = """
import json, sys
import torch
import hpctrain
from hpctrain.data import Concatenation, Padding, RaggedDataset


class Scaled(torch.utils.data.Dataset):  # a data set of the user around one of hpctrain
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        sample = dict(self.inner[index])
        return {**sample, "x": sample["x"] * 1.0}


folder, halt, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with hpctrain.init(device="cpu") as job:
    torch.manual_seed(0)
    dataset = RaggedDataset("part-*.h5", comm=job.comm)
    options = {"lengths": dataset.lengths("x")} if kind != "plain" else {}
    options |= {"most": 40} if kind == "most" else {}
    collate = Padding() if kind != "wrapped" else Concatenation(fields=("x",))
    data = Scaled(dataset) if kind == "wrapped" else dataset
    loader = job.loader(data, batch=8, seed=3, collate_fn=collate, **options)
    model = job.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, losses = {}, {}
    with job.run(model, optimizer, loader, checkpoints=folder, every=4, steps=halt or None) as run:
        for _ in run.epochs(2):
            for step, batch in run:
                def compute(part):
                    if kind == "wrapped":
                        counts = part["x_offsets"].diff()
                        sums = torch.zeros(len(counts)).index_add(0, part["x_samples"], model(part["x"])[:, 0])
                        return (sums / counts - part["target"]).square().sum(), len(counts)
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


def samples() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "x": draw.normal(size=(1 + number % 9, 2)).astype(np.float32),
            "target": np.float32(number % 3),
            "number": number,
        }
        for number in range(COUNT)
    ]


@pytest.fixture
def parts(tmp_path: Path) -> None:
    write_ragged(tmp_path / "part-0.h5", train=samples()[:21])
    write_ragged(tmp_path / "part-1.h5", train=samples()[21:])


def plain_loop(batches: list[list[int]]) -> tuple[list[float], list[list[float]]]:
    """Return the losses and the last weights of plain PyTorch, sample by sample, on batches of these samples."""
    torch.manual_seed(0)
    model, known, losses = torch.nn.Linear(2, 1), samples(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        errors = [model(torch.from_numpy(known[each]["x"])).mean() - float(known[each]["target"]) for each in batch]
        loss = torch.stack(errors).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.weight.tolist()


@pytest.mark.limit(180)
@pytest.mark.parametrize("kind", ("wrapped", pytest.param("most", marks=pytest.mark.long)))
def test_losses_and_weights_are_those_of_plain_pytorch(launch: Any, parts: None, kind: str) -> None:
    found = result_of(launch(2, PROGRAM, "run", "0", kind))
    steps = sorted(found["seen"], key=int)
    losses, weight = plain_loop([found["seen"][step] for step in steps])
    assert np.allclose([found["losses"][step] for step in steps], losses, rtol=1e-5)
    assert np.allclose(found["weight"], weight, rtol=1e-5)


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
