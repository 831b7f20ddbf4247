"""Know the optimizers whose update can be made slice by slice, and make it as they would.

Note: the same bits. torch's fused kernels compute 16 floats (a cache line) at a time from the beginning of a tensor,
and what remains at its end in another way; a slice that begins at a multiple of 16 floats is computed as in the whole.
The loops of plain calls give every element the same bits wherever it lies. Everything that looks at tensors as a whole
(the count of steps) is shared by the slices. A first update, which makes the states, is torch's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import Adam, adam
from torch.optim.sgd import SGD, sgd

LINE = 16  # floats that begin a slice lie at multiples of this

Options = Mapping[str, Any]  # what a group of an optimizer says, but for its parameters


class Kernel(Protocol):
    """Update slices of one group's parameters."""

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return those states of a parameter that have its shape; none where its first update has not been made."""

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices, a list each of parameters, gradients and of every kind of states; ``steps`` count this one."""


def kernel_for(optimizer: torch.optim.Optimizer, options: Options) -> Kernel | None:
    """Return what updates slices as an optimizer would update the whole; none where only itself knows how."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    if scaled or options.get("differentiable") or options.get("capturable"):
        return None
    if _is(optimizer, Adam):
        return _AdamKernel(options)
    return _SgdKernel(options) if _is(optimizer, SGD) else None


def _is(optimizer: torch.optim.Optimizer, kind: Any) -> bool:
    """Tell whether an optimizer makes its update by the very functions of one that is known."""
    if not isinstance(optimizer, kind) or type(optimizer)._init_group is not kind._init_group:
        return False
    # torch wraps the function that updates, also anew on a subclass at its first use.
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


class _AdamKernel:
    """Update as Adam and AdamW do, fused, by foreach or in a loop of plain calls."""

    def __init__(self, options: Options) -> None:
        self._names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options["amsgrad"])
        beta1, beta2 = options["betas"]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize")
        self._how: dict[str, Any] = {name: options[name] for name in names} | {"beta1": beta1, "beta2": beta2}
        self._decoupled = options["decoupled_weight_decay"]
        self._kind: dict[str, Any] = {name: options[name] for name in ("fused", "foreach", "decoupled_weight_decay")}
        # The function around the kernel takes longer than the kernel takes for a slice; it sorts tensors.
        self._direct = options["fused"] and not any(isinstance(one, Tensor) for one in (options["lr"], beta1, beta2))

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the moments."""
        return [state[name] for name in self._names] if state else None

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices."""
        means, squares, most = columns if self._how["amsgrad"] else (*columns, [])
        if self._direct:
            kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
            kernel(parameters, gradients, means, squares, most, steps, **self._how)
            return
        before = [step - 1 for step in steps]  # counted on by the function
        adam(parameters, gradients, means, squares, most, before, **self._kind, **self._how)


class _SgdKernel:
    """Update as SGD does."""

    def __init__(self, options: Options) -> None:
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        self._how = {name: options[name] for name in names}

    def columns(self, state: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the momentum, where there is any."""
        if self._how["momentum"] == 0:
            return []
        buffer = state.get("momentum_buffer")
        return None if buffer is None else [buffer]

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update slices."""
        buffers: list[Any] = list(columns[0]) if columns else [None] * len(parameters)
        sgd(parameters, gradients, buffers, **self._how)
