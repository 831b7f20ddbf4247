"""Stages and split matrices on a GPU: training equals that of one process; activations go through host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.meshes import plain, samples, small_gpt

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.wrap import attach

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]
STEPS = 5


@pytest.mark.parametrize(
    "settings",
    [{"pipe": 2}, {"pipe": 2, "schedule": "zb-h1"}, {"pipe": 2, "schedule": "interleaved"}, {"tensor": 2}],
)
def test_losses_equal_those_of_a_plain_loop(comm: Any, settings: dict[str, Any]) -> None:
    model = small_gpt()
    strategy = attach(model, comm, ParallelSettings(**settings), torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for step in range(STEPS):
        inputs, targets = (part.cuda() for part in samples(step))
        losses.append(strategy.forward_backward(inputs, targets, Objective(cross_entropy)).item())
        strategy.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(plain(STEPS), rel=1e-4)
