"""Training of split blocks, compared with torch's DTensor tensor parallelism on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import BLOCKS, CLOSE, make_blocks, split, vectors
from torch import nn

pytestmark = pytest.mark.ranks(2, 3)


def as_dtensors(model: nn.Module, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    for block in model.children():
        parallelize_module(block, mesh, {"fc": ColwiseParallel(), "project": RowwiseParallel()})


def test_ten_steps_equal_those_of_dtensor(comm: Any, process_group: None) -> None:
    ours, theirs = make_blocks(), make_blocks()
    split(ours, comm, BLOCKS)
    as_dtensors(theirs, comm.size)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False) for model in (ours, theirs)]
    for step in range(10):
        losses, gradients = [], []
        for model, optimizer in zip((ours, theirs), optimizers):
            inputs = vectors(step).requires_grad_()
            loss = nn.functional.mse_loss(model(inputs), inputs.detach().flip(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            gradients.append(inputs.grad)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        torch.testing.assert_close(*gradients, **CLOSE)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        local: Any = other.to_local() if hasattr(other, "to_local") else other
        assert mine.shape == local.shape, name
        torch.testing.assert_close(mine.detach(), local.detach(), rtol=1e-4, atol=1e-6)
