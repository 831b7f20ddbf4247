"""Parameters before and behind the place where sequences begin to be split get one process's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("middle", ["identity", "norm", "linear"])
def test_gradients_before_scatter_are_those_of_one_process(job: Any, middle: str, recompute: bool) -> None:
    plain, model = _model(middle), _model(middle)
    settings = {"tensor": 2, "sequence": True, "tensor_plan": PLAN, "recompute": recompute, "units": ["blocks.*"]}
    job.wrap(model, settings)
    tokens = torch.randint(0, 12, (3, LENGTH))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(tokens).square().mean().backward()
        wanted = {name: one.grad for name, one in plain.named_parameters()}
        for name, one in model.named_parameters():
            expected = wanted[name]
            assert one.grad is not None and expected is not None
            if one.grad.shape == expected.shape:  # others are slices
                torch.testing.assert_close(one.grad.as_subclass(Tensor), expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.ranks(2)
def test_parameters_of_the_model_itself_are_refused(job: Any) -> None:
    model = _model("identity", own=True)
    job.wrap(model, {"tensor": 2, "sequence": True, "tensor_plan": PLAN})
    with pytest.raises(UsageError, match="parameters scale of the model itself .*put these parameters into a module"):
        model(torch.randint(0, 12, (3, LENGTH)))
