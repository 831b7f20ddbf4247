"""Optimizer step on a subset of the parameters, as if the optimizer had no others.

Note: the second optimizer object. The step is made by another object of the optimizer's class, on
substitute parameters that share only the memory of the parameters and their states. Thus the step
touches neither the optimizer's groups nor the gradients of the parameters. Other code may read and
write these in the meantime: a schedule that sets the learning rate, or a backward pass.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.elementwise import KNOWN

# options of a group, and those of its parameters that are to be updated
Group = tuple[Mapping[str, Any], Sequence[nn.Parameter]]


def step_alone(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], gradients: Mapping[nn.Parameter, Tensor]
) -> None:
    """Run the optimizer's own step on these parameters, with these options and gradients, without calling hooks."""
    stands = {parameter: _stand_in(parameter, gradients[parameter]) for _, some in groups for parameter in some}
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    state |= {stand: optimizer.state[parameter] for parameter, stand in stands.items() if parameter in optimizer.state}
    double = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer), state=state)
    double.param_groups = [{**options, "params": [stands[one] for one in some]} for options, some in groups]
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(double)
    for parameter, stand in stands.items():
        if stand in state:
            optimizer.state[parameter] = state[stand]


def keeps_to_states(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to store data only in its states; a second object would lose other data."""
    return inspect.unwrap(type(optimizer).step) in {inspect.unwrap(known.step) for known in KNOWN}


def _stand_in(parameter: nn.Parameter, gradient: Tensor) -> nn.Parameter:
    stand = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    stand.__dict__.update(parameter.__dict__)  # attributes that the user has set
    stand.grad = gradient.view_as(parameter)
    return stand
