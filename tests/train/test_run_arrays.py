"""Whole runs on arrays: classes or floats as targets, samples instead of tokens, refusal of a wrong loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.machine import join_quietly
from support.training_fixtures import metrics_of
from torch import nn

from hpctrain.data.dataset import write_arrays
from hpctrain.errors import HpctrainError
from hpctrain.train.config import load
from hpctrain.train.recipe import train

pytestmark = pytest.mark.ranks(1, 2)
STEPS, BATCH, SAMPLES = 12, 8, 40
CONFIG = f"""
[data]
format = "arrays"
files = ["floats.h5"]
[model]
name = "mlp"
options = {{ hidden = [5] }}
[train]
steps = {STEPS}
batch = {BATCH}
seed = 3
clip = 0.0
loss = "mse"
[optimizer]
name = "sgd"
learning_rate = 0.05
schedule = "constant"
[run]
folder = "out"
"""
CLASSES = ["train.loss=cross_entropy", "data.files=classes.h5"]
MODELS = """
import torch

def wide():
    return torch.nn.Linear(3, 2)

def flat():
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
"""


@pytest.fixture
def project(shared_tmp_path: Path, comm: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with arrays, models and a config; this process works there."""
    if comm.rank == 0:
        chance = np.random.default_rng(0)
        inputs = chance.normal(size=(SAMPLES, 3)).astype("f4")
        floats, classes = inputs.sum(axis=1), (inputs[:, 0] > 0).astype("i8")
        for name, targets in {"floats": floats, "classes": classes}.items():
            pair = inputs, targets
            write_arrays(shared_tmp_path / f"{name}.h5", train=pair, validation=(inputs[:8], targets[:8]))
        (shared_tmp_path / "arrays.toml").write_text(CONFIG)
        (shared_tmp_path / "nets_of_test.py").write_text(MODELS)
    comm.barrier()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.syspath_prepend(str(shared_tmp_path))
    monkeypatch.delitem(sys.modules, "nets_of_test", raising=False)
    return shared_tmp_path


def plain_losses() -> list[float]:
    """Return the losses of a loop in one process on the float targets, one number for each sample."""
    chance = np.random.default_rng(0)
    inputs = torch.from_numpy(chance.normal(size=(SAMPLES, 3)).astype("f4"))
    targets = inputs.sum(dim=1)
    orders = [np.random.Generator(np.random.PCG64([3, epoch])).permutation(SAMPLES) for epoch in range(4)]
    order = np.concatenate(orders)
    torch.manual_seed(3)
    from hpctrain.models.build import MultiLayerPerceptron

    model = MultiLayerPerceptron(input_shape=(3,), outputs=1, hidden=[5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        loss = nn.functional.mse_loss(model(inputs[chosen])[:, 0], targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_float_targets_train_by_mse(project: Path, comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train(load("arrays.toml"), init=join_quietly)
    said = capsys.readouterr()
    comm.barrier()
    rows = metrics_of(project / "out")
    assert [row["loss"] for row in rows] == pytest.approx(plain_losses(), rel=1e-5)
    assert [row["samples"] for row in rows] == [BATCH * step for step in range(1, STEPS + 1)]
    assert not any("tokens" in row for row in rows)
    if comm.rank == 0:
        assert "training loss " in said.out and "nats" not in said.out and "bits" not in said.out
        assert " samples/s " in said.err and "tokens" not in said.err


@pytest.mark.parametrize(
    "words, said",
    [
        (["train.loss=cross_entropy"], "'cross_entropy' takes classes (whole numbers), the targets of floats.h5 are f"),
        (["data.files=classes.h5"], "'mse' takes floats, the targets of classes.h5 are whole numbers"),
        (["train.loss=mae"], "setting train.loss = 'mae': allowed are cross_entropy, mse, or package.module:function"),
        (
            ["model.factory=nets_of_test:wide", "model.options={}"],
            "the model's output has shape (1, 2), the targets have shape (1,); they must agree sample by sample",
        ),
        (
            ["model.factory=nets_of_test:flat", "model.options={}", *CLASSES],
            "train.loss = 'cross_entropy' cannot compare the model's output, float32 of shape (1,), with the targets, ",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(project: Path, comm: Any, words: list[str], said: str) -> None:
    with pytest.raises(HpctrainError) as found:
        train(load("arrays.toml", words), init=join_quietly)
    assert said in str(found.value) and "\n" not in str(found.value) and found.value.exit_code == 2
    assert not (project / "out").exists()


def test_an_output_may_omit_the_dimension_of_one_number(project: Path, comm: Any) -> None:
    train(load("arrays.toml", ["model.factory=nets_of_test:flat", "model.options={}"]), init=join_quietly)
    comm.barrier()
    assert metrics_of(project / "out")[-1]["loss"] < 0.5
