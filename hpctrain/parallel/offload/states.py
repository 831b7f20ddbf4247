"""Placement of optimizer states in other memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Room = Callable[[int, torch.dtype], Tensor]  # allocates memory for a number of elements


def place(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], room: Room) -> None:
    """Move the states of parameters that have the parameter's shape into memory that ``room`` allocates.

    Values are unchanged. Other states (step counts) stay where they are. States are created by the
    first update.
    """
    for parameter in parameters:
        for name, value in _shaped_like(optimizer, parameter):
            optimizer.state[parameter][name] = room(value.numel(), value.dtype).view_as(value).copy_(value)


class States:
    """States of an optimizer's parameters in memory that ``room`` allocates, also after ``load_state_dict``.

    Each state gets its memory once. The tensors that ``load_state_dict`` assigns are copied there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], room: Room) -> None:
        self._optimizer, self._parameters, self._room = optimizer, list(parameters), room
        self._places: dict[tuple[nn.Parameter, str], Tensor] = {}
        own = weakref.ref(self)

        def loaded(_: torch.optim.Optimizer) -> None:
            if (states := own()) is not None:
                states.settle()

        handle = optimizer.register_load_state_dict_post_hook(loaded)
        weakref.finalize(self, handle.remove)
        self.settle()

    def settle(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move states that were created or replaced since the last call, of all parameters or of some."""
        for parameter in self._parameters if parameters is None else parameters:
            for name, value in _shaped_like(self._optimizer, parameter):
                place = self._places.get((parameter, name))
                if place is None or place.dtype is not value.dtype or place.shape != value.shape:
                    place = self._room(value.numel(), value.dtype).view_as(value)
                    self._places[parameter, name] = place
                if value.data_ptr() != place.data_ptr():
                    self._optimizer.state[parameter][name] = place.copy_(value)


def _shaped_like(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Return the names and values of the states that have a parameter's shape."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel()
    ]
