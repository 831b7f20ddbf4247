"""Recomputed activations in data parallelism: gradients come in another order, or twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.replicas import BOTH, TINY, Branches, assert_same, backward, branch_gradients, gradients, part
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

pytestmark = pytest.mark.ranks


class Recomputed(Branches):
    """Branches, the named ones of which are recomputed in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor, use: Sequence[str]) -> torch.Tensor:
        for name in use:
            x = checkpoint(super().forward, x, [name], use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputed):
    """Branches recomputed by a nested (reentrant) backward pass."""

    reentrant = True


@BOTH
@pytest.mark.parametrize("kind", [Recomputed, Reentrant])
def test_activations_may_be_recomputed(comm: Any, settings: ParallelSettings, kind: type[Branches]) -> None:
    model = kind()
    DataParallel(model, comm, settings)
    for _ in range(3):
        model.zero_grad()
        inputs, targets = part(comm, comm.rank)
        backward(model, (inputs.requires_grad_(), targets), 1, *"abc")
        assert_same(gradients(model), branch_gradients(comm, ["abc"] * comm.size))


def test_a_parameter_that_gets_its_gradient_twice_is_refused(own: Any) -> None:
    model = Branches()
    DataParallel(model, own, TINY)
    inputs, targets = part(own, own.rank)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: model(y, "a"), x, use_reentrant=True)

    # The last use of c starts the outer pass; a then comes twice, from two inner ones.
    outputs = model(twice(twice(inputs.requires_grad_())), "c")
    with pytest.raises(UsageError, match=r"^parameter a\..* got its gradient twice in one .*use_reentrant=False"):
        (outputs - targets).square().mean().backward()
