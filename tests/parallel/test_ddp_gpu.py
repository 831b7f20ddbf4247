"""Data parallelism on a GPU: gradients staged through node memory, results equal to those of one process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

pytestmark = pytest.mark.gpu
BATCH, WIDTH, STEPS = 12, 16, 5
TOLERANCE: dict[str, float] = {"none": 1e-5, "bfloat16": 2e-2}


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)).cuda()


def train(model: nn.Module, inputs: torch.Tensor) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(STEPS):
        mse_loss(model(inputs), inputs.flip(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("compression", ["none", "bfloat16"])
def test_ranks_that_share_a_gpu_train_like_one_process(comm: Any, compression: Literal["none", "bfloat16"]) -> None:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    alone = train(make(), inputs)
    model = make()
    DataParallel(model, comm, ParallelSettings(compression=compression))
    train(model, inputs.chunk(comm.size)[comm.rank])
    for ours, plain in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, plain, rtol=TOLERANCE[compression], atol=TOLERANCE[compression])
