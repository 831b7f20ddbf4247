"""Optimizer from the settings, and its learning rate as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.errors import SettingsError
from hpctrain.parallel.model_agreement import trainable
from hpctrain.settings import call_named, function_named, unknown
from hpctrain.train.config import OPTIMIZER_ARGUMENTS, OptimizerSettings

_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_REFUSED = {
    "LBFGS": "it computes the loss several times per update, hpctrain train once",
    "SparseAdam": "it accepts only sparse gradients; other parameters need another optimizer",
}
# Fused versions make one pass over the states: five times faster than the loop on a CPU. These options conflict.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_NOT_FUSED = ("fused", "foreach", "differentiable")

_PROBE = 64  # rows and columns of the test matrix
_CACHE: dict[str, float] = {}

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of ``torch.optim`` by lower-case name."""
    base = torch.optim.Optimizer
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, base)]
    return {kind.__name__.lower(): kind for kind in kinds if kind is not base}


def resolve(settings: OptimizerSettings) -> OptimizerFactory:
    """Return the optimizer class or factory of the settings after checking its options; needs no model.

    Raises ``SettingsError`` for an unknown name, an option that the optimizer does not have, or a
    missing factory.
    """
    if settings.factory is not None:
        what, factory = f"optimizer.factory {settings.factory}", function_named(settings.factory, "optimizer.factory")
    else:
        known = classes()
        kind = known.get(settings.name.lower())
        if kind is None:
            raise SettingsError(unknown(f"optimizer.name {settings.name!r}", settings.name.lower(), list(known)))
        if kind.__name__ in _REFUSED:
            raise SettingsError(f"setting optimizer.name = {settings.name!r}: {_REFUSED[kind.__name__]}")
        what, factory = f"optimizer {kind.__name__}", kind
    _check_arguments(what, factory, settings)
    return factory


def make(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the settings for a model; weight decay applies to parameters of two or more dims.

    Raises ``SettingsError`` for values that the optimizer refuses, or a factory that returns
    another type.
    """
    factory = resolve(settings)
    given = arguments(factory, settings)
    groups = _groups(model, factory, given)
    if settings.factory is not None:
        made: Any = call_named("optimizer.factory", settings.factory, factory, groups, **given)
        if not isinstance(made, torch.optim.Optimizer):
            raise SettingsError(
                f"optimizer.factory {settings.factory} returned {type(made).__name__}, expected a torch.optim.Optimizer"
            )
        return made
    try:
        return factory(groups, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        listed = ", ".join(f"{name} = {value}" for name, value in given.items())
        raise SettingsError(f"optimizer.name = {settings.name!r} with {listed}: {error}") from error


def state_per_element(settings: OptimizerSettings) -> float:
    """Return the state elements per parameter element of a matrix, measured by one update: 2 for AdamW."""
    kept = _CACHE.get(repr(settings))
    if kept is None:
        matrix = nn.Linear(_PROBE, _PROBE, bias=False, device="meta").to_empty(device="cpu")  # draws no random numbers
        optimizer = make(matrix, settings)
        matrix.weight.grad = torch.ones_like(matrix.weight)
        optimizer.step()
        tensors = [each for each in optimizer.state[matrix.weight].values() if isinstance(each, torch.Tensor)]
        kept = _CACHE[repr(settings)] = sum(each.numel() for each in tensors if each.dim()) / matrix.weight.numel()
    return kept


def arguments(factory: OptimizerFactory, settings: OptimizerSettings) -> dict[str, Any]:
    takes = _parameters(factory)
    given = _set(settings)
    if factory is torch.optim.AdamW:
        given = {**_DEFAULTS, **given}
    if factory in _FUSED and not any(name in settings.options for name in _NOT_FUSED):
        given["fused"] = True
    if takes is None or "lr" in takes:
        given["lr"] = settings.learning_rate
    options = {name: tuple(one) if isinstance(one, list) else one for name, one in settings.options.items()}
    return {**given, **options}


def _groups(model: nn.Module, factory: OptimizerFactory, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups with and without weight decay; one group if the optimizer has no weight decay."""
    parameters = [parameter for _, parameter in trainable(model)]
    takes = _parameters(factory)
    if takes is not None and "weight_decay" not in takes:
        return [{"params": parameters}]
    default = takes["weight_decay"].default if takes else 0.0
    decay = given.get("weight_decay", 0.0 if default is inspect.Parameter.empty else default)
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_arguments(what: str, factory: OptimizerFactory, settings: OptimizerSettings) -> None:
    takes = _parameters(factory)
    if takes is None:
        return  # it accepts any keyword: errors appear in the call
    known = [name for name in takes if name not in ("params", "lr")]
    for name in settings.options:
        if name not in takes:
            raise SettingsError(unknown(f"option {name} of {what} in optimizer.options", name, known))
    for setting, name in OPTIMIZER_ARGUMENTS.items():
        if name in _set(settings) and name not in takes:
            raise SettingsError(f"setting optimizer.{setting}: {what} takes no {name}; it takes {', '.join(known)}")


def _set(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the settings that are set, except the learning rate, by their torch names."""
    found = {name: getattr(settings, setting) for setting, name in OPTIMIZER_ARGUMENTS.items() if name != "lr"}
    return {name: value for name, value in found.items() if value is not None}


def _parameters(factory: OptimizerFactory) -> Mapping[str, inspect.Parameter] | None:
    """Return the keyword arguments after the parameters; None for a function with ``**kwargs``."""
    try:
        found = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found):
        return None
    return {each.name: each for each in found[1:]}


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Return the learning rate of update number ``step`` (from 1) of ``steps``."""
    if step <= settings.warmup:
        return settings.learning_rate * step / settings.warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup) / max(steps - settings.warmup, 1)
    share = settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the same learning rate in all groups of an optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = rate
