"""Ownership check: every optimizer parameter must belong to a model, which names it in checkpoints."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UsageError

SINGLE = "model"  # the key of a run's one model, if other modules join it
_SHOWN = 8  # parameters that an error message names; the rest are counted


def adoptable(
    optimizers: Mapping[str, torch.optim.Optimizer],
    models: Mapping[str, nn.Module],
    wrapped_modules: Iterable[nn.Module],
) -> dict[str, nn.Module]:
    """Return, by name, the wrapped modules that own parameters which an optimizer has and no model has.

    The name is the class name in snake case (``center_loss``). The second and later modules of a
    class are numbered (``center_loss_1``) in the order in which they were wrapped. ``joined``
    merges the result with the models.
    """
    lost = {id(parameter) for _, parameter in _without_owner(optimizers, models.values())}
    known = {id(module) for module in models.values()}
    candidates = [module for module in wrapped_modules if id(module) not in known and lost & _ids(module)]
    inner = {id(part) for module in candidates for part in module.modules() if part is not module}
    found: dict[str, nn.Module] = {}
    for module in candidates:
        if id(module) not in inner:
            found[_name(module, {*models, *found, SINGLE})] = module
    return found


def joined(models: Mapping[str, nn.Module], more: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models of a run plus those that ``adoptable`` found; a single model gets the key ``model``."""
    if not more:
        return dict(models)
    return {**{key or SINGLE: module for key, module in models.items()}, **more}


def check_owned(optimizers: Mapping[str, torch.optim.Optimizer], models: Mapping[str, nn.Module]) -> None:
    """Raise ``UsageError`` on all ranks if optimizer parameters belong to no model; the message lists them."""
    lost = list(_without_owner(optimizers, models.values()))
    if not lost:
        return
    told = [f"{where}, {_origin(parameter)}, shape {tuple(parameter.shape)}" for where, parameter in lost[:_SHOWN]]
    more = f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    modules = ", ".join(f'"{key or SINGLE}": ...' for key in models)
    count = len(lost)
    subject = f"{count} parameters of the optimizer belong" if count > 1 else "1 parameter of the optimizer belongs"
    raise UsageError(
        f"{subject} to no model of the run: {'; '.join(told)}{more}; "
        "a checkpoint stores parameters by their names in a model; "
        "wrap the module that has them (job.wrap(criterion); a loose parameter goes into a module first) and pass it: "
        f'job.run({{{modules}, "criterion": criterion}}, ...)',
        everywhere=True,
    )


def _without_owner(
    optimizers: Mapping[str, torch.optim.Optimizer], models: Iterable[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer parameters that belong to no model, each with its position in the optimizer."""
    owned = set().union(*map(_ids, models))
    for key, optimizer in optimizers.items():
        of = f'optimizer "{key}", ' if key else ""
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in owned:
                    yield f"{of}parameter {position} of group {number}", parameter


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _name(module: nn.Module, taken: set[str]) -> str:
    base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def _origin(parameter: torch.Tensor) -> str:
    """Return the attribute and module class of a parameter, e.g. ``Linear.weight``, for an error message."""
    tables = [one for one in gc.get_referrers(parameter) if type(one) is dict]
    for table, holder in ((table, holder) for table in tables for holder in gc.get_referrers(table)):
        module: Any = holder
        if type(holder) is dict and holder.get("_parameters") is table:
            module = next((one for one in gc.get_referrers(holder) if isinstance(one, nn.Module)), None)
        if isinstance(module, nn.Module) and module._parameters is table:
            name = next(name for name, value in table.items() if value is parameter)
            return f"{type(module).__name__}.{name}"
    return "in no module"
