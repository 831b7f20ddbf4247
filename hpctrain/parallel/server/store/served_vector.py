"""Lay a model's parameters behind each other, as an optimizer groups them, with a place for their gradients.

Tables, whose gradients are sparse, stay where they are, and their gradients are kept row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.server import flat
from hpctrain.parallel.server.tables.table import find_tables
from hpctrain.parallel.strategy import trainable


class ServedVector:
    """Hold dense parameters as one vector on the model's device, and their gradients as one in the host's memory.

    Note: staging. On a GPU both go through vectors of their own, so that a step copies once each way: ``host`` is what
    the memory of others is read into, and gradients are first laid behind each other where they are.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        known = {parameter: name for name, parameter in trainable(model)}
        ordered = [[one for one in group["params"] if one in known] for group in optimizer.param_groups]
        self.parameters = [parameter for group in ordered for parameter in group]
        if len(set(self.parameters)) != len(known):
            missing = next((name for one, name in known.items() if one not in set(self.parameters)), "")
            raise UsageError(
                f"the optimizer does not have the parameter {missing}: a server updates all", everywhere=True
            )
        self.tables = find_tables(model)
        apart = {table.parameter for table in self.tables}
        self.table_groups = [table.group_in(optimizer) for table in self.tables]
        self.parameters = [parameter for parameter in self.parameters if parameter not in apart]
        self._names = known
        self._flat = flat.Flat(model, self.parameters, apart)
        self.values, self.places = self._flat.values, self._flat.places
        self.groups = [sum(one.numel() for one in group if one not in apart) for group in ordered]
        self.rows: list[Tensor | None] = [None for _ in self.tables]
        self._staged = not flat.on_host(self.values)
        self.gradient = self._on_host()
        self.host = self._on_host().copy_(self.values) if self._staged else self.values
        self._device_gradient = torch.empty_like(self.values) if self._staged else self.gradient

    def _on_host(self) -> Tensor:
        return torch.zeros(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)

    # Parameters -------------------------------------------------------------------------------------------------------

    def take_host(self) -> None:
        """Let the parameters be what ``host`` holds."""
        if self._staged:
            self.values.copy_(self.host)

    def give_host(self) -> Tensor:
        """Return the parameters in the host's memory."""
        return self.host.copy_(self.values) if self._staged else self.values

    # Gradients --------------------------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Take the gradients out of the parameters; tell whether there was any."""
        found = any(parameter.grad is not None for parameter in self.parameters)
        self.copy_gradients(self.gradient)
        for parameter in self.parameters:
            parameter.grad = None
        self.rows = [table.gradient() for table in self.tables]
        return found or any(rows is not None for rows in self.rows)

    def norm(self) -> Tensor:
        """Return the norm of what was collected."""
        pieces = [self.gradient, *(rows.values() for rows in self.rows if rows is not None)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]))
        return norm

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the dense gradients out, to the host's memory, zeros where there is none."""
        there = self._device_gradient if self._staged else out
        for parameter, view in zip(self.parameters, self.views(there)):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.layout is not torch.strided:
                raise UsageError(
                    f"the parameter {self._names[parameter]} got a sparse gradient: only those of nn.Embedding and "
                    "nn.EmbeddingBag can be served"
                )
            else:
                view.copy_(parameter.grad)
        if self._staged:
            out.copy_(there)

    def give_gradients(self, gradients: Tensor) -> None:
        """Let dense gradients, in the host's memory, be those of the parameters."""
        there = self._device_gradient.copy_(gradients) if self._staged else gradients
        for parameter, view in zip(self.parameters, self.views(there)):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector that belong to each parameter, in their shapes."""
        return [vector[place].view(parameter.shape) for parameter, place in zip(self.parameters, self.places)]
