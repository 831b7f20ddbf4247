"""Flat vector of a model's parameters, so that they are communicated as one tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import trainable


def on_host(values: Tensor) -> bool:
    """Return whether parameters are in host memory, where other ranks can access them."""
    return values.device.type == "cpu"


class Flat:
    """Trained parameters of a model as one vector, ``values``; the model's parameters become views of it."""

    def __init__(
        self, model: nn.Module, order: Sequence[nn.Parameter] = (), without: Collection[nn.Parameter] = ()
    ) -> None:
        """Flatten in an ``order``, or in the model's order; parameters in ``without`` stay unchanged."""
        rank = {parameter: number for number, parameter in enumerate(order)}
        named = sorted(trainable(model), key=lambda item: rank.get(item[1], 0))
        if not named:
            raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
        first = named[0][1]
        for name, parameter in named:
            if parameter.dtype is not first.dtype or parameter.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"the parameter {name} is of {parameter.dtype}, {named[0][0]} of {first.dtype}: replicas that "
                    "differ need all of them in float32, or all in float64; for narrower passes set train.precision",
                    everywhere=True,
                )
        apart = set(without)
        named = [(name, parameter) for name, parameter in named if parameter not in apart]
        total = sum(parameter.numel() for _, parameter in named)
        self.values = torch.empty(total, dtype=first.dtype, device=first.device)
        self.places: list[slice] = []
        self._parameters = [parameter for _, parameter in named]
        at = 0
        for _, parameter in named:
            self.places.append(slice(at, at + parameter.numel()))
            view = self.values[self.places[-1]].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            at += parameter.numel()

    def move_to(self, values: Tensor) -> None:
        """Make the parameters views of another vector, which already holds their values."""
        self.values = values
        for parameter, place in zip(self._parameters, self.places):
            parameter.data = values[place].view(parameter.shape)

    def host(self) -> Tensor:
        """Return the values in host memory: the vector itself if it is there, else a copy."""
        if on_host(self.values):
            return self.values
        return torch.empty(self.values.shape, dtype=self.values.dtype).copy_(self.values)
