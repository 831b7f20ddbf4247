"""Lay the parameters of a model behind each other, so that all of them travel as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import trainable


class Flat:
    """Hold the parameters that a model trains as one vector, ``values``; the model's own become views of it."""

    def __init__(self, model: nn.Module) -> None:
        named = trainable(model)
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
        total = sum(parameter.numel() for _, parameter in named)
        self.values = torch.empty(total, dtype=first.dtype, device=first.device)
        at = 0
        for _, parameter in named:
            view = self.values[at : at + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            at += parameter.numel()

    def host(self) -> Tensor:
        """Return the values in the host's memory: themselves, where they lie there."""
        return self.values.cpu()
