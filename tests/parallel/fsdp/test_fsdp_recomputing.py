"""Recomputed activations, by the model's own code or by the setting, do not change gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.replicas import make_gpt, token_loss, tokens
from support.shards import check_steps, shard
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.recompute import recompute

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]


GPT_STEPS: dict[str, Any] = {
    "passes": lambda model, batch: token_loss(model(batch[0]), batch[1]).backward(),
    "batches": tokens,
}


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
    check_steps(comm, strategy, alone, **GPT_STEPS)


def test_reentrant_checkpointing_of_units_does_not_change_gradients(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, units=("Block",))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    check_steps(comm, strategy, alone, **GPT_STEPS)
