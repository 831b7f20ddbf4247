"""In-place updates of an owner's parameters, by torch's own optimizer of the worker's class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.parallel.asynchronous.store.states import States, hyperparameters, like


@dataclass(frozen=True)
class Part:
    """Contiguous parameters, or rows of a table, with their optimizer states."""

    group: int  # index into the parameter groups of the worker's optimizer
    values: Tensor
    states: dict[str, Tensor]
    kept: States


class Piece:
    """Parts that are updated in one optimizer step."""

    def __init__(self, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> None:
        self._source, self._parts = optimizer, parts
        self._parameters = [nn.Parameter(part.values) for part in parts]
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for part, parameter in zip(parts, self._parameters):
            groups[part.group].append(parameter)
        self._numbers = [number for number, group in enumerate(groups) if group]
        self._own = like(optimizer, groups)
        for part, parameter in zip(parts, self._parameters):
            state: dict[str, Any] = dict(part.states)
            if part.kept.step:
                state["step"] = torch.zeros(()) if part.kept.step == "tensor" else 0
            self._own.state[parameter] = state

    def step(self, gradients: Sequence[Tensor | None], seen: Sequence[int]) -> None:
        """Update the parts that have a gradient; ``seen`` has the number of earlier updates of each part."""
        for number, group in zip(self._numbers, self._own.param_groups):
            group.update(hyperparameters(self._source.param_groups[number]))
        for part, parameter, gradient, count in zip(self._parts, self._parameters, gradients, seen):
            parameter.grad = gradient
            if part.kept.step == "tensor":
                self._own.state[parameter]["step"].fill_(count)
            elif part.kept.step:
                self._own.state[parameter]["step"] = count
        self._own.step()
        for parameter in self._parameters:
            parameter.grad = None
