"""Flat vectors of a model's parameters and gradients, in the order of the optimizer's groups.

Tables, whose gradients are sparse, are not moved; their gradients are kept as rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous import flat
from hpctrain.parallel.asynchronous.tables.table import find_tables
from hpctrain.parallel.strategy import trainable


class ServedVector:
    """Dense parameters as one vector on the model's device, and their gradients as one in host memory.

    Note: staging. On a GPU, both have an additional staging vector, so that a step makes one copy
    in each direction. Remote memory is read into ``host``. Gradients are first flattened on the
    device.
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
        """Set the parameters to the contents of ``host``."""
        if self._staged:
            self.values.copy_(self.host)

    def give_host(self) -> Tensor:
        """Return the parameters in host memory."""
        return self.host.copy_(self.values) if self._staged else self.values

    # Gradients --------------------------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Move the gradients out of the parameters; return whether there were any."""
        found = any(parameter.grad is not None for parameter in self.parameters)
        self.copy_gradients(self.gradient)
        for parameter in self.parameters:
            parameter.grad = None
        self.rows = [table.gradient() for table in self.tables]
        return found or any(rows is not None for rows in self.rows)

    def norm(self) -> Tensor:
        """Return the norm of the collected gradients."""
        pieces = [self.gradient, *(rows.values() for rows in self.rows if rows is not None)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]))
        return norm

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the dense gradients to host memory, with zeros for missing ones."""
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
        """Set the parameters' gradients to dense gradients from host memory."""
        there = self._device_gradient.copy_(gradients) if self._staged else gradients
        for parameter, view in zip(self.parameters, self.views(there)):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to each parameter, in their shapes."""
        return [vector[place].view(parameter.shape) for parameter, place in zip(self.parameters, self.places)]
