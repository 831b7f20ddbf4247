"""Checks before each update of an optimizer for mistakes that would let replicas diverge."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from hpctrain.errors import UsageError


class LateParameters:
    """Parameters that a program has created after its model was wrapped: no strategy reduces their gradients."""

    def __init__(self, model: nn.Module, held: Iterable[nn.Parameter]) -> None:
        self._model = weakref.ref(model)
        self._known = {id(parameter) for parameter in held}

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add parameters that the strategy has adopted."""
        self._known |= {id(parameter) for parameter in parameters}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` for a parameter of the model that the optimizer holds and the strategy does not."""
        model = self._model()
        if model is None or all(self._known.issuperset(map(id, group["params"])) for group in optimizer.param_groups):
            return
        new = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._known]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        late = [names[id(parameter)] for parameter in new if id(parameter) in names]
        if late:
            raise UsageError(
                f"parameters that the model has got after job.wrap(model): {', '.join(late[:4])}"
                f"{', ...' if len(late) > 4 else ''}; their gradients would stay each rank's own; build the whole "
                "model, its parametrizations included, before job.wrap",
                everywhere=True,
            )
        self._known |= {id(parameter) for parameter in new}  # of another model
