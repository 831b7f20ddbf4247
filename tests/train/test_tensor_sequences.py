"""Gradients of parameters before and after the layer where sequences are split, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import Objective

pytestmark = pytest.mark.ranks(2)
WIDTH, LENGTH = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Model(nn.Module):
    def __init__(self, middle: nn.Module, *, own: bool = False) -> None:
        super().__init__()
        self.embed, self.positions, self.middle = nn.Embedding(12, WIDTH), Positions(), middle
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if own else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.positions(self.embed(tokens)))
        x = self.blocks(x if self.scale is None else x * self.scale)
        logits: Tensor = self.head(self.norm(x))
        return logits


PLAN = ("middle=scatter", "*.up=column", "*.down=row", "head=vocabulary")


def _model(middle: str, *, own: bool = False) -> Model:
    torch.manual_seed(0)
    made = {"identity": nn.Identity(), "norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, WIDTH)}[middle]
    return Model(made, own=own).double()


def _check_gradients(model: nn.Module, plain: nn.Module) -> None:
    wanted, held = dict(plain.named_parameters()), dict(model.named_parameters())
    assert held
    for name, one in held.items():
        found, grad = one.grad, wanted[name].grad
        assert found is not None and grad is not None
        if found.shape == grad.shape:  # others are slices
            torch.testing.assert_close(found.as_subclass(Tensor), grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("middle", ["identity", "norm", "linear"])
def test_gradients_before_scatter_equal_those_of_one_process(job: Any, middle: str, recompute: bool) -> None:
    plain, model = _model(middle), _model(middle)
    settings = {"tensor": 2, "sequence": True, "tensor_plan": PLAN, "recompute": recompute, "units": ["blocks.*"]}
    job.wrap(model, settings)
    tokens = torch.randint(0, 12, (3, LENGTH))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(tokens).square().mean().backward()
        _check_gradients(model, plain)


def test_parameters_of_the_model_itself_are_refused(job: Any) -> None:
    model = _model("identity", own=True)
    job.wrap(model, {"tensor": 2, "sequence": True, "tensor_plan": PLAN})
    with pytest.raises(UsageError, match="parameters scale of the model itself .*put these parameters into a module"):
        model(torch.randint(0, 12, (3, LENGTH)))


class Late(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.positions(self.middle(self.embed(tokens)))))
        return logits


def test_a_table_of_positions_after_scatter_is_refused(job: Any) -> None:
    model = Late(nn.Identity())
    job.wrap(model, {"tensor": 2, "sequence": True, "tensor_plan": PLAN})
    wanted = r"in positions .*follows middle \(Identity, middle=scatter\), .*must come before"
    with pytest.raises(UsageError, match=wanted):
        model(torch.randint(0, 12, (3, LENGTH)))


class Row(Model):
    def layers(self) -> list[nn.Module]:
        return [self.embed, self.positions, self.middle, *self.blocks, self.norm, self.head]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("partition", ["2,5", "3,4", "1,6", "6,1"])
@pytest.mark.parametrize("called_first", [False, True])
def test_stages_agree_where_sequences_are_split(job: Any, partition: str, called_first: bool) -> None:
    plain, model = _model("linear"), Row(nn.Linear(WIDTH, WIDTH)).double()
    model.load_state_dict(plain.state_dict())
    settings = {"pipe": 2, "tensor": 2, "sequence": True, "tensor_plan": PLAN, "partition": partition}
    job.wrap(model, settings)
    tokens, targets = torch.randint(0, 12, (4, LENGTH)), torch.randint(0, 12, (4, LENGTH))
    with torch.no_grad():
        if called_first:
            torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-10, atol=1e-12)
    objective = Objective(compare=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    loss = job.strategy(model).forward_backward(tokens, targets, objective)
    expected = F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().float())
    _check_gradients(model, plain)
