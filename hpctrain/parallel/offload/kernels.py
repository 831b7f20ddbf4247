"""Optimizers whose update can be made slice by slice, with the same result as their own step.

Note: the second optimizer object. The step is made by another object of the optimizer's class, on
substitute parameters that share only the memory of the parameters and their states. Thus the step
touches neither the optimizer's groups nor the gradients of the parameters. Other code may read and
write these in the meantime: a schedule that sets the learning rate, or a backward pass.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import Adam, adam
from torch.optim.sgd import SGD, sgd

from hpctrain.parallel.fsdp.optimizer import ELEMENTWISE

# options of a group, and those of its parameters that are to be updated
Group = tuple[Mapping[str, Any], Sequence[nn.Parameter]]


def step_subset(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], gradients: Mapping[nn.Parameter, Tensor]
) -> None:
    """Run the optimizer's own step on these parameters, with these options and gradients, without calling hooks."""
    substitutes = {parameter: _substitute(parameter, gradients[parameter]) for _, some in groups for parameter in some}
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    state |= {
        substitute: optimizer.state[parameter]
        for parameter, substitute in substitutes.items()
        if parameter in optimizer.state
    }
    second = object.__new__(type(optimizer))
    vars(second).update(vars(optimizer), state=state)
    second.param_groups = [{**options, "params": [substitutes[one] for one in some]} for options, some in groups]
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(second)
    for parameter, substitute in substitutes.items():
        if substitute in state:
            optimizer.state[parameter] = state[substitute]


def only_uses_states(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to store data only in its states; a second object would lose other data."""
    return inspect.unwrap(type(optimizer).step) in {inspect.unwrap(known.step) for known in ELEMENTWISE}


def _substitute(parameter: nn.Parameter, gradient: Tensor) -> nn.Parameter:
    substitute = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    substitute.__dict__.update(parameter.__dict__)  # attributes that the user has set
    substitute.grad = gradient.view_as(parameter)
    return substitute


# Optimizers whose update can be made slice by slice, with the same result as their own step ---------------------------
#
# Note: bitwise equality. Torch's fused kernels compute 16 floats (a cache line) at a time from the
# beginning of a tensor, and compute the remainder at its end in another way. If a slice begins at a
# multiple of 16 floats, its result equals that of the whole tensor. Loops of plain calls give every
# element the same bits wherever it is in memory. State of the whole tensor (the step count) is shared
# by the slices. The first update, which creates the states, is made by torch.


LINE = 16  # slices begin at multiples of this number of floats

Options = Mapping[str, Any]  # options of a parameter group of an optimizer, without its parameters


class UpdateKernel(Protocol):
    """Update of slices of the parameters of one optimizer group."""

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the states that have the shape of the parameter; None before its first update."""

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices: lists of parameters, gradients and each kind of state; ``steps`` include this update."""


def kernel_for(optimizer: torch.optim.Optimizer, options: Options) -> UpdateKernel | None:
    """Return a kernel that updates slices as an optimizer would update the whole; None if there is none for it."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    if scaled or options.get("differentiable") or options.get("capturable"):
        return None
    if _is(optimizer, Adam):
        return _AdamKernel(options)
    return _SgdKernel(options) if _is(optimizer, SGD) else None


def _is(optimizer: torch.optim.Optimizer, kind: Any) -> bool:
    """Return whether an optimizer's update uses exactly the functions of a known optimizer class."""
    if not isinstance(optimizer, kind) or type(optimizer)._init_group is not kind._init_group:
        return False
    # Torch wraps ``step``, and wraps it again on a subclass at its first use.
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


class _AdamKernel:
    """Update of Adam and AdamW: fused, by foreach, or in a loop of plain calls."""

    def __init__(self, options: Options) -> None:
        self._names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options["amsgrad"])
        beta1, beta2 = options["betas"]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize")
        self._arguments: dict[str, Any] = {name: options[name] for name in names} | {"beta1": beta1, "beta2": beta2}
        self._decoupled = options["decoupled_weight_decay"]
        self._variant: dict[str, Any] = {name: options[name] for name in ("fused", "foreach", "decoupled_weight_decay")}
        # The wrapper of the kernel sorts tensors, which takes longer than the kernel takes for a
        # slice.
        self._direct = options["fused"] and not any(isinstance(one, Tensor) for one in (options["lr"], beta1, beta2))

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the moments."""
        return [state[name] for name in self._names] if state else None

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices."""
        means, squares, most = columns if self._arguments["amsgrad"] else (*columns, [])
        if self._direct:
            kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
            kernel(parameters, gradients, means, squares, most, steps, **self._arguments)
            return
        before = [step - 1 for step in steps]  # the function increments the count
        adam(parameters, gradients, means, squares, most, before, **self._variant, **self._arguments)


class _SgdKernel:
    """Update of SGD."""

    def __init__(self, options: Options) -> None:
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        self._arguments = {name: options[name] for name in names}

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the momentum buffer; an empty list without momentum."""
        if self._arguments["momentum"] == 0:
            return []
        buffer = state.get("momentum_buffer")
        return None if buffer is None else [buffer]

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices."""
        buffers: list[Any] = list(columns[0]) if columns else [None] * len(parameters)
        sgd(parameters, gradients, buffers, **self._arguments)
