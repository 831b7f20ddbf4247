"""Recomputed activations, by the model's own code or by the setting, do not change gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.replicas import (
    assert_same,
    gradients,
    make_gpt,
    make_mlp,
    part,
    share,
    token_loss,
    tokens,
    vectors,
)
from support.shards import shard, whole_gradients
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.recompute import recompute

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]


def check_steps(comm: Any, model: Any, alone: Any, strategy: Any) -> None:
    """Compare the gradients of three steps with those of one process."""
    for step in range(3):
        inputs, targets = (share(tensor, comm) for tensor in tokens(step))
        token_loss(model(inputs), targets).backward()
        token_loss(alone(tokens(step)[0]), tokens(step)[1]).backward()
        assert_same(whole_gradients(comm, model, strategy), gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("inside", [False, True], ids=["around_units", "inside_units"])
def test_activation_checkpointing_does_not_change_gradients(comm_and_some_variant: Any, inside: bool) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, units=("Block",))
    if inside:
        recompute(model.blocks)
    else:
        blocks = list(model.blocks)
        calls = [lambda x, block=block: checkpoint(block, x, use_reentrant=False) for block in blocks]

        def forward(words: torch.Tensor) -> torch.Tensor:
            x = model.embedding(words)
            for call in calls:
                x = call(x)
            return model.head(model.norm(x))

        model.forward = forward
    check_steps(comm, model, alone, strategy)


def test_reentrant_checkpointing_of_the_whole_model_does_not_change_gradients(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_mlp(), make_mlp()
    strategy = shard(model, comm, variant)
    for each, (inputs, targets) in ((model, part(comm, comm.rank)), (alone, vectors())):
        once = checkpoint(each, inputs.clone().requires_grad_(), use_reentrant=True)
        mse_loss(checkpoint(each, once, use_reentrant=True), targets).backward()
    assert_same(whole_gradients(comm, model, strategy), gradients(alone))


def test_reentrant_checkpointing_of_units_does_not_change_gradients(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, units=("Block",))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    check_steps(comm, model, alone, strategy)
