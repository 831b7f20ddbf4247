"""Sequence parallelism between split layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.counting_comm import CountingComm
from support.tensor_fixtures import (
    BLOCKS,
    CLOSE,
    LENGTH,
    WIDTH,
    assert_slices,
    make_blocks,
    split,
    vectors,
)
from torch import Tensor, nn

from hpctrain.errors import UsageError

RANKS = pytest.mark.ranks(2, 3, 4)
PLAN = {**BLOCKS, "first": "scatter", "last": "gather"}


class Net(nn.Module):
    """Model with whole sequences in the first layer, split ones in blocks, a parameter of its own and a last layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = make_blocks(2, dropout)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.widths: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, WIDTH]`` to ``[batch, length, 3]``."""
        x = self.blocks(self.first(x))
        self.widths.append(tuple(x.shape))
        return self.last(self.between(x))  # type: ignore[no-any-return]


@RANKS
@pytest.mark.parametrize("apart", [False, True], ids=["fused", "separate"])
def test_sequences_are_split_between_two_modules(comm: Any, apart: bool) -> None:
    model, alone = Net(), Net()
    found = split(model, comm, PLAN, sequence=True)
    if apart:
        found.separate_backward()
    results = []
    for each in (model, alone):
        result = each(vectors().requires_grad_())
        result.square().sum().backward()
        results.append(result)
    torch.testing.assert_close(*results, **CLOSE)
    assert model.widths == [(4, LENGTH // comm.size, WIDTH)] and alone.widths == [(4, LENGTH, WIDTH)]
    assert_slices(model, alone, found, lambda parameter: parameter.grad, rtol=1e-5, atol=1e-5)


@RANKS
def test_one_message_sums_the_gradients_of_a_module(comm: Any) -> None:
    counting, model = CountingComm.of(comm), Net()
    split(model, counting, PLAN, sequence=True)
    result = model(vectors())
    counting.take()
    result.sum().backward()
    sizes = [nbytes // 4 for name, nbytes in counting.take() if name == "all_reduce"]
    norm, row_bias, between = 2 * WIDTH, WIDTH, WIDTH * WIDTH + WIDTH
    assert sizes == [between, row_bias, norm, row_bias, norm]
    counting.free()


@RANKS
def test_frozen_parameters_are_not_summed_and_evaluation_has_no_effect(comm: Any) -> None:
    model = Net()
    split(model, comm, PLAN, sequence=True)
    for parameter in model.blocks[0].norm.parameters():
        parameter.requires_grad_(False)
    before = dict(model.blocks[1].norm.named_parameters())
    with torch.no_grad():
        model(vectors())
    model(vectors()).sum().backward()
    assert model.blocks[0].norm.weight.grad is None and model.blocks[1].norm.weight.grad is not None
    after = dict(model.blocks[1].norm.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is one for name, one in before.items())


@RANKS
def test_parameters_are_restored_when_a_module_fails(comm: Any) -> None:
    model = Net()
    split(model, comm, PLAN, sequence=True)
    before = model.between.weight
    with pytest.raises(RuntimeError):
        model.between(torch.ones(1, 1, WIDTH + 1))
    assert model.between.weight is before


@pytest.mark.ranks(2)
def test_activations_that_cannot_be_split_are_refused(comm: Any) -> None:
    model = Net()
    split(model, comm, PLAN, sequence=True)
    with pytest.raises(UsageError, match="^a sequence of 11 tokens cannot be split over 2 tensor ranks: with seq"):
        model(vectors()[:, :11])
    with pytest.raises(UsageError, match=r"needs activations \[batch, length, width\], not of shape \(12, 24\)"):
        model(vectors()[0])
