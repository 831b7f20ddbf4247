"""Lay a model's parameters behind each other, as an optimizer groups them, with a place for their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.server.flat import Flat
from hpctrain.parallel.strategy import trainable


class ServedVector:
    """Hold parameters as one vector on the model's device, and their gradients as one in the host's memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        known = {parameter: name for name, parameter in trainable(model)}
        ordered = [[one for one in group["params"] if one in known] for group in optimizer.param_groups]
        self.parameters = [parameter for group in ordered for parameter in group]
        if len(set(self.parameters)) != len(known):
            missing = next((name for one, name in known.items() if one not in set(self.parameters)), "")
            raise UsageError(
                f"the optimizer does not have the parameter {missing}: a server updates all", everywhere=True
            )
        self._flat = Flat(model, self.parameters)
        self.values = self._flat.values
        self.groups = [sum(parameter.numel() for parameter in group) for group in ordered]
        self.gradient = torch.zeros(self.values.numel(), dtype=self.values.dtype)
        self.places = self._flat.places

    def collect(self) -> bool:
        """Take the gradients out of the parameters; tell whether there was any."""
        found = False
        for parameter, place in zip(self.parameters, self.places):
            if parameter.grad is None:
                self.gradient[place].zero_()
                continue
            if parameter.grad.layout is not torch.strided:
                raise UsageError("a parameter got a sparse gradient: only dense ones can be served")
            found = True
            self.gradient[place].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
        return found

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the gradients out, zeros where there is none."""
        for parameter, view in zip(self.parameters, self.views(out)):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector that belong to each parameter, in their shapes."""
        return [vector[place].view(parameter.shape) for parameter, place in zip(self.parameters, self.places)]
