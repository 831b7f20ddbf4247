"""Training of a GPT that is split over the ranks, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import CLOSE, assert_slices, make_gpt, split, token_loss, tokens
from torch import Tensor, nn

from hpctrain.parallel.meta_init import is_meta, materialise
from hpctrain.parallel.tensor.sharding import TensorSplit

pytestmark = pytest.mark.ranks(2, 3, 4)
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
APART = pytest.mark.parametrize("apart", [False, True], ids=["fused", "separate"])


def split_loss(found: TensorSplit, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with found.split_outputs():
        return found.cross_entropy(model(inputs), targets)


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return token_loss(model(inputs), targets)


@TIED
@SEQUENCE
@APART
def test_outputs_and_gradients_equal_those_of_the_unsplit_model(
    comm: Any, tied: bool, sequence: bool, apart: bool
) -> None:
    model, alone = make_gpt(tied=tied), make_gpt(tied=tied)
    found = split(model, comm, sequence=sequence)
    if apart:
        found.separate_backward()
    assert_slices(model, alone, found, lambda parameter: parameter.data)
    inputs, targets = tokens()
    torch.testing.assert_close(model(inputs), alone(inputs), **CLOSE)
    expected = whole_loss(alone, inputs, targets)
    expected.backward()
    for loss in (whole_loss(model, inputs, targets), split_loss(found, model, inputs, targets)):
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close(loss, expected, **CLOSE)
        assert_slices(model, alone, found, lambda parameter: parameter.grad, **CLOSE)
    for name, parameter in model.named_parameters():
        if not found.is_split(name):  # the same bits on all ranks
            assert all(torch.equal(parameter.grad, other) for other in comm.all_gather_object(parameter.grad)), name


@SEQUENCE
def test_meta_weights_become_slices_of_those_of_the_unsplit_model(comm: Any, sequence: bool) -> None:
    alone = make_gpt()
    with torch.device("meta"):
        model = make_gpt()
    found = split(model, comm, sequence=sequence)
    assert is_meta(model)  # unsplit modules are initialised by the strategy of the data axis
    assert not any(one.is_meta for module in found.modules.values() for one in module.parameters())
    materialise(model, torch.device("cpu"))
    assert_slices(model, alone, found, lambda parameter: parameter.data)
    assert model.head.weight is model.embedding.token.weight
    torch.testing.assert_close(model(tokens()[0]), alone(tokens()[0]), **CLOSE)


@SEQUENCE
def test_half_precision_by_autocast_stays_close(comm: Any, sequence: bool) -> None:
    model, alone = make_gpt(), make_gpt()
    found = split(model, comm, sequence=sequence)
    for apart in (False, True):
        if apart:
            found.separate_backward()
        for each in (model, alone):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = each(tokens()[0])
            assert logits.dtype is torch.bfloat16
            token_loss(logits.float(), tokens()[1]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype is torch.float32, name
        assert_slices(model, alone, found, lambda parameter: parameter.grad, rtol=0.1, atol=5e-3)
