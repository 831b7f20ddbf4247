"""Ranks with empty shards, because the model is small, take part in every collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import assert_same, share
from support.shards import shard, whole_weights
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.clip import clip_whole_gradients

pytestmark = pytest.mark.ranks
BATCH = 12


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 2, generator=generator), torch.randn(BATCH, 1, generator=generator)


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(2, 1, bias=False)


@pytest.mark.parametrize("clip", [0.01, 100.0, float("inf")])
def test_clipping_works_with_ranks_without_gradients(comm_and_variant: Any, clip: float) -> None:
    comm, variant = comm_and_variant
    alone, model = make(), make()
    strategy = shard(model, comm, variant)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(3):
        whole = batch(step)
        mse_loss(alone(whole[0]), whole[1]).backward()
        mse_loss(model(share(whole[0], comm)), share(whole[1], comm)).backward()
        norms = [clip_whole_gradients(alone, clip), strategy.clip_grad_norm(clip)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole_weights(model, strategy), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert 0 in comm.all_gather_object(held) or variant.within == "node"
