"""Optimizers whose update can be made slice by slice, with the same result as their own step.

Note: the second optimizer object. The step is made by another object of the optimizer's class, on
substitute parameters that share only the memory of the parameters and their states. Thus the step
touches neither the optimizer's groups nor the gradients of the parameters. Other code may read and
write these in the meantime: a schedule that sets the learning rate, or a backward pass.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import Adam, adam
from torch.optim.sgd import SGD, sgd

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
    if not isinstance(optimizer, kind):
        return False
    # Torch wraps ``step`` again on a subclass at its first use, and torch.compile wraps ``_init_group`` of every class.
    return all(
        inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(kind, name))
        for name in ("step", "_init_group")
    )


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
        return [state[name] for name in self._names] if state else None

    def __call__(
        self, parameters: list[Tensor], gradients: list[Tensor], columns: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
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
        buffers: list[Any] = list(columns[0]) if columns else [None] * len(parameters)
        sgd(parameters, gradients, buffers, **self._arguments)


# Slices of parameters that a thread updates together ------------------------------------------------------------------


_GRADIENTS = (torch.float32, torch.bfloat16)
_thread_local = threading.local()


@dataclass(slots=True)
class ParameterRow:
    """A parameter with its gradient, copy and states; ``step`` counts the update to be made."""

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None
    columns: list[Tensor]
    step: Tensor | None

    def fits(self) -> bool:
        """Return whether all tensors can be cut alike: on the host, contiguous, parameter and states in float32."""
        numel, columns = self.parameter.numel(), [self.parameter, *self.columns]
        copies = [] if self.copy is None else [self.copy]
        return (
            numel > 0
            and all(one.dtype is torch.float32 for one in columns)
            and self.gradient.dtype in _GRADIENTS
            and all(
                one.numel() == numel and one.device.type == "cpu" and one.is_contiguous()
                for one in (*columns, *copies, self.gradient)
            )
        )

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Return a key that distinguishes the memory that is kept between updates from other memory."""
        copy = () if self.copy is None else (self.copy.data_ptr(), self.copy.dtype)
        return self.parameter.data_ptr(), copy, *(one.data_ptr() for one in self.columns)


class ParameterSlices:
    """Slices of the data that is kept between updates: a parameter, its copy, its states."""

    def __init__(self, row: ParameterRow, numel: int) -> None:
        self.made_for = numel, row.memory_key
        self.parameters: Sequence[Tensor] = torch.split(row.parameter.view(-1), numel)
        nothing = [None] * len(self.parameters)
        self.copies: Sequence[Tensor | None] = nothing if row.copy is None else torch.split(row.copy.view(-1), numel)
        self.columns: list[Sequence[Tensor]] = [torch.split(one.view(-1), numel) for one in row.columns]


@dataclass(slots=True)
class SliceGroup:
    """Slices that a thread updates together, one list per kind."""

    kernel: UpdateKernel
    columns: list[list[Tensor]]  # one list per kind of state
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    copies: list[Tensor | None] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    aligned_numel: int = 0  # elements, including the alignment of the slices
    exact: bool = True  # whether all gradients are float32

    def update(self, scale: Tensor | None, numel: int) -> None:
        """Update the slices by their gradients times ``scale``, if given, and write the copies."""
        gradients = self.gradients if self.exact and scale is None else _scaled(self.gradients, scale, numel)
        self.kernel(self.parameters, gradients, self.columns, self.steps)
        for copy, parameter in zip(self.copies, self.parameters):
            if copy is not None:
                copy.copy_(parameter)


def slice_groups(
    kernel: UpdateKernel, rows: Iterable[tuple[ParameterRow, ParameterSlices]], numel: int
) -> Iterator[SliceGroup]:
    """Put slices that one kernel updates into batches of at most ``numel`` elements, a multiple of ``LINE``."""
    batch = None
    for row, slices in rows:
        gradients = torch.split(row.gradient.view(-1), numel)
        for number, (parameter, gradient) in enumerate(zip(slices.parameters, gradients)):
            aligned = _aligned(parameter.numel())
            if batch is None or batch.aligned_numel + aligned > numel:
                if batch is not None:
                    yield batch
                batch = SliceGroup(kernel, [[] for _ in row.columns])
            batch.parameters.append(parameter)
            batch.gradients.append(gradient)
            batch.exact &= gradient.dtype is torch.float32
            batch.copies.append(slices.copies[number])
            for kind, column in zip(batch.columns, slices.columns):
                kind.append(column[number])
            if row.step is not None:
                batch.steps.append(row.step)
            batch.aligned_numel += aligned
    if batch is not None:
        yield batch


def _scaled(gradients: list[Tensor], scale: Tensor | None, numel: int) -> list[Tensor]:
    """Return gradients as float32, times ``scale``, in memory of this thread that stays in its cache."""
    scratch: Tensor | None = getattr(_thread_local, "scratch", None)
    if scratch is None or scratch.numel() < numel:
        scratch = _thread_local.scratch = torch.empty(numel, dtype=torch.float32)
    scaled, first = [], 0
    for gradient in gradients:
        size = gradient.numel()
        target = scratch if size == scratch.numel() else scratch[first : first + size]
        first += _aligned(size)
        if gradient.dtype is not torch.float32:
            gradient = target.copy_(gradient)
        if scale is not None:
            gradient = torch.mul(gradient, scale, out=target)
        scaled.append(gradient)
    return scaled


def _aligned(numel: int) -> int:
    return -(-numel // LINE) * LINE
