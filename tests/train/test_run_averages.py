"""Averages of weights in runs: each rank averages its shards, and one process reads the average from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from hpctrain import checkpoint

STEPS, SAMPLES = 6, 12


def make_model() -> nn.Module:
    torch.manual_seed(17)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def loader() -> Any:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(36, 5, generator=generator).double(), torch.randn(36, 3, generator=generator).double()
    return DataLoader(TensorDataset(x, y), batch_size=SAMPLES)


def expected() -> tuple[AveragedModel, float]:
    """Return the average that a loop in one process makes, and its loss."""
    model = make_model()
    average, optimizer, made = averaged(model), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), 0
    while made < STEPS:
        for x, y in loader():
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            made += 1
    with torch.no_grad():
        return average, float(sum(F.mse_loss(average(x), y) for x, y in loader()) / 3)


def train(job: Any, strategy: str, folder: Path, steps: int) -> float:
    """Train up to a number of steps, and return the loss of the average."""
    model = make_model()
    average = averaged(model)
    job.wrap(model, strategy)
    job.wrap(average, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    models = {"net": model, "ema": average}
    with job.run(models, {"net": optimizer}, loader(), checkpoints=str(folder), steps=steps) as run:
        for _, (x, y) in run:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        if strategy != "ddp":
            held = job.comm.all_gather_object(sum(each.numel() for each in average.parameters()))
            assert sum(held) == sum(each.numel() for each in make_model().parameters())  # each rank has a part of it
        return float(run.evaluate(loader(), lambda batch: F.mse_loss(average(batch[0]), batch[1])))


@pytest.mark.ranks(2, 3)
def test_averages_equal_those_of_one_process_under_any_strategy(job: Any, shared_tmp_path: Path) -> None:
    average, loss = expected()
    for number, strategy in enumerate(["fsdp", "zero1", "ddp"], 1):
        found = train(job, strategy, shared_tmp_path, number * STEPS // 3)
    assert found == pytest.approx(loss, rel=1e-12)
    read = averaged(make_model())
    checkpoint.load(sorted(shared_tmp_path.rglob("*.h5"))[-1], model={"ema": read}, skip=["net/*"])
    assert int(read.n_averaged) == STEPS
    for name, value in average.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-12, atol=1e-14)
