from __future__ import annotations

from typing import Any

import pytest
import torch
from piping.candidates import Alone
from piping.check import drift, find
from piping.task import SMALL


class OneRank:
    """Communicator of one rank with the methods that a check uses."""

    rank, size = 0, 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Broken(Alone):
    """Candidate that drops one gradient, or compares with wrong targets."""

    def __init__(self, what: str) -> None:
        super().__init__(SMALL, OneRank(), 4)  # type: ignore[arg-type]
        self.what = what

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        loss = super().step(inputs, targets.roll(1, 0) if self.what == "loss" else targets)
        if self.what == "norm":
            self.model.get_parameter("norm.bias").grad = None
        return loss


def test_losses_and_gradients_equal_those_of_a_plain_pass() -> None:
    comm: Any = OneRank()
    found = find(comm, Alone(SMALL, comm, 4), SMALL)
    model = SMALL.model()
    inputs, targets = SMALL.batch(-1, 4)
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert found.loss == pytest.approx(loss.item(), rel=1e-5) and found.norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_candidate_that_computes_something_else_is_detected(what: str) -> None:
    comm: Any = OneRank()
    found = drift(comm, {"right": Alone(SMALL, comm, 4), "wrong": Broken(what)}, SMALL)
    assert found["right"].loss == found["right"].norm == 0
    assert getattr(found["wrong"], what) > 1e-5
