"""Runs with optimizers of whole parameters: they resume under other strategies and numbers of ranks bit for bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hpctrain import checkpoint
from hpctrain.errors import UsageError

STEPS = 8


def make_model() -> nn.Module:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 7), nn.Linear(7, 3, bias=False))
    return model.double()


def optimizers_of(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return {
        "matrices": torch.optim.Muon(matrices[:2], lr=0.05, weight_decay=0.01),
        "head": torch.optim.Adafactor(matrices[2:], lr=0.05),
        "others": torch.optim.AdamW(others, lr=0.01),
    }


def loader() -> Any:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(48, 6, generator=generator).double(), torch.randn(48, 3, generator=generator).double()
    return DataLoader(TensorDataset(x, y), batch_size=12)


def train(job: Any, strategy: str, folder: Path, steps: int) -> list[float]:
    """Train up to a number of steps, and return the losses of the steps made here."""
    model = job.wrap(make_model(), strategy)
    optimizers = optimizers_of(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in optimizers.values()]
    losses = []
    with job.run(model, optimizers, loader(), checkpoints=str(folder), steps=steps) as run:
        for _, (x, y) in run:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            losses.append(float(job.comm.all_reduce(loss.detach().clone(), "average")))
    return losses


def tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of the model and its optimizers in the last checkpoint."""
    found: dict[str, Any] = {}
    with h5py.File(sorted(folder.rglob("*.h5"))[-1]) as file:
        for group in ("model", "optimizer"):
            file[group].visititems(
                lambda name, each, group=group: (
                    found.update({f"{group}/{name}": each[()]}) if isinstance(each, h5py.Dataset) else None
                )
            )
    return found


@pytest.mark.ranks(2, 3)
def test_a_run_continues_under_other_strategies(job: Any, shared_tmp_path: Path) -> None:
    straight = train(job, "ddp", shared_tmp_path / "straight", STEPS)
    passed = []
    for number, strategy in enumerate(["zero1", "fsdp", "ddp", "zero2"], 1):
        passed += train(job, strategy, shared_tmp_path / "passed", number * STEPS // 4)
    assert passed == pytest.approx(straight, rel=1e-12)
    if job.rank == 0:
        expected, found = tensors(shared_tmp_path / "straight"), tensors(shared_tmp_path / "passed")
        assert expected.keys() == found.keys() and len(expected) > 18
        for name in expected:
            assert np.allclose(expected[name], found[name], rtol=1e-9, atol=1e-12), name
        assert any(name.endswith("momentum_buffer") for name in found) and any("row_var" in name for name in found)
        _check_read_by_one_process(shared_tmp_path / "passed")


def _check_read_by_one_process(folder: Path) -> None:
    model = make_model()
    optimizers = optimizers_of(model)
    checkpoint.load(sorted(folder.rglob("*.h5"))[-1], model=model, optimizer=optimizers)
    stored, matrix = tensors(folder), model.get_parameter("3.weight")
    assert np.array_equal(stored["model/3.weight"], matrix.detach().numpy())
    buffer = optimizers["matrices"].state[matrix]["momentum_buffer"]
    assert np.array_equal(stored["optimizer/matrices/3.weight/momentum_buffer"], buffer.numpy())
    assert float(optimizers["head"].state[model.get_parameter("4.weight")]["step"]) == STEPS


@pytest.mark.ranks(2)
def test_whole_parameters_are_refused_where_they_are_not_to_be_had(job: Any) -> None:
    model = job.wrap(make_model(), "zero1", offload={"optimizer": True})
    with pytest.raises(UsageError, match="optimizer Muon with offloaded updates"):
        job.strategy(model).check_optimizer(optimizers_of(model)["matrices"])


@pytest.mark.ranks(2)
def test_a_file_of_one_ranks_states_is_refused(job: Any) -> None:
    model = job.wrap(make_model(), "fsdp")
    optimizer = optimizers_of(model)["matrices"]
    F.mse_loss(model(torch.ones(2, 6).double()), torch.ones(2, 3).double()).backward()
    optimizer.step()
    states = [state for state in optimizer.state_dict()["state"].values() if state]
    assert len(states) == 1  # each rank owns one of two matrices
    with pytest.raises(UsageError, match="writing the optimizer's state of this rank's shard of parameter"):
        torch.save(states, io.BytesIO())
