"""Data parallelism over several nodes, equal or not: the same gradients, also if the model itself communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import (
    BATCH,
    BOTH,
    KINDS,
    WIDTH,
    Branches,
    assert_same,
    assert_same_on_all_ranks,
    backward,
    gradients,
    learn,
    part,
    share,
    vectors,
    weights,
)
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.wrap import attach

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.limit(30)]


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_one_process(spread: Any, kind: str, settings: ParallelSettings) -> None:
    alone, model = KINDS[kind][0](), KINDS[kind][0]()
    DataParallel(model, spread, settings)
    losses = learn(model, kind, 4, spread)
    torch.testing.assert_close(losses, learn(alone, kind, 4), rtol=1e-5, atol=0)
    assert_same(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(spread, weights(model))


def test_compressed_gradients_are_equal_on_all_ranks(spread: Any) -> None:
    model = Branches()
    DataParallel(model, spread, ParallelSettings(compression="bfloat16"))
    backward(model, part(spread, spread.rank), 1, *"abc")
    assert_same_on_all_ranks(spread, gradients(model))


class Normed(nn.Module):
    """Model with batch norms, whose backward pass has collectives, and parameters used for only some samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH)}) for _ in range(3)
        )
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        """Scale the samples that are marked; without any, leave the scales out."""
        for layer, scale in zip(self.layers, self.scales):
            x = torch.tanh(layer["norm"](layer["linear"](x)))
            if marked.any():
                x = torch.where(marked, x * scale, x)
        return x


def test_collectives_of_the_backward_pass_may_interleave_with_reductions(spread: Any) -> None:
    # Buckets are full at different times on different ranks, while all ranks synchronise in the batch norms.
    model, alone = Normed(), Normed()
    attach(model, spread, ParallelSettings(bucket_mib=1e-6, sync_batchnorm=True))
    every_other = torch.arange(BATCH).chunk(spread.size)
    marked = torch.cat([torch.full((len(rows), 1), rank % 2 == 0) for rank, rows in enumerate(every_other)])
    for step in range(3):
        inputs, targets = vectors(step)
        for each, cut in ((model, lambda tensor: share(tensor, spread)), (alone, lambda tensor: tensor)):
            each.zero_grad()
            mse_loss(each(cut(inputs), cut(marked)), cut(targets)).backward()
        assert_same(gradients(model), gradients(alone))
        assert_same_on_all_ranks(spread, gradients(model))
