"""In-place updates of an owner's parameters, by torch's own optimizer of the worker's class, and its states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

DENSE_OPTIMIZERS = "SGD, Adam, AdamW and Adagrad can be served"
SPARSE_OPTIMIZERS = "SGD and Adagrad without momentum and weight decay, and SparseAdam, take them"


@dataclass(frozen=True)
class StateSpec:
    """Optimizer states of a parameter: tensors of its shape with their initial values, and a step count."""

    tensors: tuple[tuple[str, float], ...] = ()
    step: Literal["", "tensor", "number"] = ""


def states_of(optimizer: torch.optim.Optimizer, group: int = 0, *, table: str = "") -> StateSpec:
    """Return the states of an optimizer, found by an update of a small matrix.

    With the name of a ``table``, the probe has a gradient of some rows only. Raises ``UsageError``
    for states that a server cannot hold and for gradients that torch refuses.
    """
    probe = nn.Parameter(torch.zeros(2, 2))
    probe_optimizer = optimizer_like(
        optimizer, [[probe] if number == group else [] for number in range(len(optimizer.param_groups))]
    )
    before = {key: value.clone() for key, value in probe_optimizer.state[probe].items() if isinstance(value, Tensor)}
    probe.grad = _row_of_ones(probe) if table else torch.ones(2, 2)
    kind = type(optimizer).__name__
    try:
        probe_optimizer.step()
    except RuntimeError as error:
        what, supported = (
            (f"the sparse gradients of {table}", SPARSE_OPTIMIZERS) if table else ("dense gradients", DENSE_OPTIMIZERS)
        )
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{kind} with these options cannot use {what} ({reason}): {supported}", everywhere=True
        ) from error
    tensors, step = [], ""
    for key, value in probe_optimizer.state[probe].items():
        if value is None:
            continue
        if key == "step":
            step = "tensor" if isinstance(value, Tensor) else "number"
        elif isinstance(value, Tensor) and value.shape == probe.shape and value.layout is torch.strided:
            tensors.append((key, float(before[key].flatten()[0].item()) if key in before else 0.0))
        else:
            raise UsageError(_refusal(kind, key, table), everywhere=True)
    return StateSpec(tuple(tensors), step)  # type: ignore[arg-type]


def _row_of_ones(matrix: Tensor) -> Tensor:
    where = torch.zeros(1, 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(where, torch.ones(1, 2), matrix.shape, is_coalesced=True)


def _refusal(kind: str, key: str, table: str) -> str:
    if table:
        return f"{kind} keeps {key}, by which rows of {table} move that have no gradient: {SPARSE_OPTIMIZERS}"
    return f"{kind} keeps {key}, which is not one number per element: a server cannot hold it; {DENSE_OPTIMIZERS}"


def union_of(several: Sequence[StateSpec]) -> StateSpec:
    """Return the union of several states."""
    tensors = {key: first for each in several for key, first in each.tensors}
    return StateSpec(tuple(tensors.items()), next((each.step for each in several if each.step), ""))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, for updates in host memory."""
    chosen = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "capturable" in chosen:
        chosen["capturable"] = False  # is for CUDA graphs
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in chosen.items()}


def optimizer_like(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and hyperparameters for other parameters."""
    chosen = []
    for own, parameters in zip(optimizer.param_groups, groups):
        chosen.append({**hyperparameters(own), "params": list(parameters)})
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters  # some arguments take effect when states are created, not later
    options = {key: value for key, value in hyperparameters(optimizer.defaults).items() if key in known}
    return kind([group for group in chosen if group["params"]], **options)  # type: ignore[no-any-return]


# In-place updates of an owner's parameters, by torch's own optimizer of the worker's class ----------------------------


@dataclass(frozen=True)
class OptimizerPart:
    """Contiguous parameters, or rows of a table, with their optimizer states."""

    group: int  # index into the parameter groups of the worker's optimizer
    values: Tensor
    states: dict[str, Tensor]
    spec: StateSpec


class PartGroup:
    """Parts that are updated in one optimizer step."""

    def __init__(self, parts: Sequence[OptimizerPart], optimizer: torch.optim.Optimizer) -> None:
        self._source, self._parts = optimizer, parts
        self._parameters = [nn.Parameter(part.values) for part in parts]
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for part, parameter in zip(parts, self._parameters):
            groups[part.group].append(parameter)
        self._group_indices = [number for number, group in enumerate(groups) if group]
        self._optimizer = optimizer_like(optimizer, groups)
        for part, parameter in zip(parts, self._parameters):
            state: dict[str, Any] = dict(part.states)
            if part.spec.step:
                state["step"] = torch.zeros(()) if part.spec.step == "tensor" else 0
            self._optimizer.state[parameter] = state

    def step(self, gradients: Sequence[Tensor | None], seen: Sequence[int]) -> None:
        """Update the parts that have a gradient; ``seen`` has the number of earlier updates of each part."""
        for number, group in zip(self._group_indices, self._optimizer.param_groups):
            group.update(hyperparameters(self._source.param_groups[number]))
        for part, parameter, gradient, count in zip(self._parts, self._parameters, gradients, seen):
            parameter.grad = gradient
            if part.spec.step == "tensor":
                self._optimizer.state[parameter]["step"].fill_(count)
            elif part.spec.step:
                self._optimizer.state[parameter]["step"] = count
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
