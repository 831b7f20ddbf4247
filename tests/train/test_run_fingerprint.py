"""Fingerprints of whole runs: in the rows of steps with a checkpoint, in the file, and in what a run prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import join_quietly
from support.train_runs import shared_project
from support.training_fixtures import metrics_of
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.checkpoint.format.reader import Reader
from hpctrain.train.config import load
from hpctrain.train.recipe import train


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", ["false", "true"])
def test_rows_with_a_checkpoint_have_that_of_the_file(
    comm: Any,
    shared_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    background: str,
) -> None:
    config = shared_project(comm, shared_tmp_path) / "tiny.toml"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(config.parent)
    monkeypatch.syspath_prepend(str(config.parent))
    folder = shared_tmp_path / "run"
    words = [f"run.folder={folder}", "train.steps=5", "checkpoint.every=2", "checkpoint.keep=9"]
    train(load("tiny.toml", [*words, f"checkpoint.background={background}"]), init=join_quietly)
    if comm.rank:
        return
    found = {row["step"]: row["fingerprint"] for row in metrics_of(folder) if "fingerprint" in row}
    stored = {}
    for path in sorted((folder / "checkpoints").glob("step_*.h5")):
        with Reader(path) as reader:
            stored[reader.root["step"]] = reader.fingerprint
    assert found == stored and list(found) == [2, 4, 5] and len(set(found.values())) == 3
    assert f"fingerprint      {found[5]} (of all weights and moments)" in capsys.readouterr().out


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("every", (100, 3))
def test_the_last_row_of_epochs_has_that_of_the_end(job: Any, comm: Any, shared_tmp_path: Path, every: int) -> None:
    torch.manual_seed(1)
    model = job.wrap(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(12, 3)), batch_size=4)
    with job.run(model, optimizer, loader, checkpoints=str(shared_tmp_path / "run"), every=every) as run:
        for _ in run.epochs(2):
            for _, (batch,) in run:
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    if comm.rank == 0:
        rows = metrics_of(shared_tmp_path / "run")
        assert [row["step"] for row in rows if "fingerprint" in row] == ([6] if every == 100 else [3, 6])
        with Reader(shared_tmp_path / "run/checkpoints/step_00000006.h5") as reader:
            assert rows[-1]["fingerprint"] == run.fingerprint == reader.fingerprint
