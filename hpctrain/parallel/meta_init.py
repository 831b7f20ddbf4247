"""Materialisation of models built on the meta device: memory and initial values, module by module.

A module initialises its values by ``reset_parameters()``, as torch's own modules do. Alternatively
the model has a method ``initialise(name, module)``, which is called with each module and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

Cut = Callable[[str, Tensor], Tensor]  # maps a parameter's name in its module and its value to the part to keep

# Module attribute that holds, by name, tensors that were removed before they had values (for
# example, because they belong to another stage of a pipeline).
REMOVED = "_hpctrain_gone"


def is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_initialisable(model: nn.Module) -> None:
    """Raise ``UsageError`` for a module with meta parameters or buffers that has no initialisation method."""
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *_removed(module).values()]
        if any(tensor.is_meta for tensor in tensors) and _initialiser(model, name, module) is None:
            raise UsageError(
                f"module {name or 'of the whole model'} of class {type(module).__name__} is on the meta device and has "
                "no reset_parameters() to draw its values: write one, or give the model initialise(name, module)",
                everywhere=True,
            )


def materialise(model: nn.Module, device: torch.device, cuts: Mapping[nn.Module, Cut] | None = None) -> None:
    """Allocate and initialise a whole model, in place.

    ``cuts`` maps modules to functions that return the part of each value that this rank keeps, by
    attribute. If the model initialises every module from its name alone, only these modules get
    values in this case. Otherwise all modules do, because each draw depends on the earlier ones.
    """
    check_initialisable(model)
    modules = list(model.named_modules())
    if not is_meta(model) and not any(_removed(module) for _, module in modules):
        return
    uninitialised = {module for _, module in modules if any(one.is_meta for one in module.parameters(recurse=False))}
    uninitialised |= {module for _, module in modules if _removed(module)}
    if cuts is not None and _initialises_by_name(model):
        uninitialised &= cuts.keys()
    else:
        uninitialised |= {model.get_submodule(name) for name in make_buffers(model, device)}
    slices: dict[nn.Parameter, Tensor] = {}
    for name, module in reversed(modules):  # the first owner of a tied parameter initialises it last
        if module not in uninitialised:
            continue  # it has its values, which may be slices of a draw
        for attribute, value in initial_values(model, name, module, device).items():
            parameter = cast(nn.Parameter, module._parameters[attribute])
            if cuts is None or module not in cuts:
                _assign(parameter, value)
            else:  # another owner may draw it again while it is whole
                slices[parameter] = cuts[module](attribute, value)
        vars(module).pop(REMOVED, None)
    for parameter, value in slices.items():
        _assign(parameter, value)


def _assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Assign a parameter's values; it remains the same object, because other modules may share it."""
    if parameter.is_meta:
        swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
        swap(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        parameter.data.copy_(value)


def make_buffers(model: nn.Module, device: torch.device) -> list[str]:
    """Allocate meta buffers, which are initialised with their module's parameters; return the modules' names."""
    found = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                found.append(path)
    return list(dict.fromkeys(found))


@torch.no_grad()
def initial_values(model: nn.Module, name: str, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return initial values of a module's own parameters, by attribute; initialise its buffers in place.

    The parameters themselves do not change.
    """
    call = _initialiser(model, name, module)
    if call is None or not (module._parameters or module._buffers):
        return {}
    names = [name for name, old in module._parameters.items() if old is not None]
    held = [*names, *module.buffers(recurse=False)]
    if not held and _removed(module) and _initialises_by_name(model):
        return {}
    with _allocated(module, device) as allocated:
        call()
    return {name: allocated[name] for name in names}


def _removed(module: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = vars(module).get(REMOVED, {})
    return found


def _initialises_by_name(model: nn.Module) -> bool:
    """Return whether the model initialises modules by name; otherwise each draw advances torch's generator."""
    return callable(getattr(model, "initialise", None))


def _initialiser(model: nn.Module, name: str, module: nn.Module) -> Callable[[], object] | None:
    whole = getattr(model, "initialise", None)
    if callable(whole):
        return lambda: whole(name, module)
    for attribute in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, attribute, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


@contextmanager
def _allocated(module: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Allocate a module's own and removed parameters for the ``with`` block; yield their memory by name."""
    parameters, buffers = dict(module._parameters), set(module._buffers)
    allocated: dict[str, Tensor] = {}
    try:
        for name, old in [*parameters.items(), *_removed(module).items()]:
            if old is None:
                continue
            if name in buffers:
                module._buffers[name] = torch.zeros_like(old, device=device)
                continue
            empty = torch.empty(old.shape, dtype=old.dtype, device=device)
            memory = nn.Parameter(empty, requires_grad=old.requires_grad)
            allocated[name] = memory.detach()
            module._parameters[name] = memory
        yield allocated
    finally:
        module._parameters.update(parameters)
        module._buffers.update({name: None for name in _removed(module) if name in buffers})
