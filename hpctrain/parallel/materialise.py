"""Give models that were built on the meta device their memory and their first values, a module at a time.

A module draws its values by ``reset_parameters()``, as torch's own do; or the model draws them, by a method
``initialise(name, module)`` that is called with the module and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

Cut = Callable[[str, Tensor], Tensor]  # from a parameter's name in its module and its value to what is kept

# The attribute of a module that holds, by name, what was taken out of it (as it lies on another stage of a pipeline)
# before it had values.
GONE = "_hpctrain_gone"


def is_meta(model: nn.Module) -> bool:
    """Tell whether any parameter or buffer has no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_drawable(model: nn.Module) -> None:
    """Raise ``UsageError`` for a module with parameters or buffers on the meta device that nobody can draw."""
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False), *_gone(module).values()]
        if any(tensor.is_meta for tensor in own) and _draws(model, name, module) is None:
            raise UsageError(
                f"module {name or 'of the whole model'} of class {type(module).__name__} is on the meta device and has "
                "no reset_parameters() to draw its values: write one, or give the model initialise(name, module)",
                everywhere=True,
            )


def materialise(model: nn.Module, device: torch.device, cuts: Mapping[nn.Module, Cut] | None = None) -> None:
    """Give a whole model its memory and its values, in place.

    ``cuts`` say what this rank keeps of the values of modules, by attribute. Where the model draws every module from
    its name alone, only those modules get values then; elsewhere all do, because one draw depends on those before.
    """
    check_drawable(model)
    modules = list(model.named_modules())
    if not is_meta(model) and not any(_gone(module) for _, module in modules):
        return
    blank = {module for _, module in modules if any(one.is_meta for one in module.parameters(recurse=False))}
    blank |= {module for _, module in modules if _gone(module)}
    if cuts is not None and _by_name(model):
        blank &= cuts.keys()
    else:
        blank |= {model.get_submodule(name) for name in make_buffers(model, device)}
    slices: dict[nn.Parameter, Tensor] = {}
    for name, module in reversed(modules):  # of a tied parameter the first owner has the last word
        if module not in blank:
            continue  # it has its values, which may be slices of what it would draw
        for attribute, value in draw(model, name, module, device).items():
            parameter = cast(nn.Parameter, module._parameters[attribute])
            if cuts is None or module not in cuts:
                _give(parameter, value)
            else:  # which another owner may draw again, as long as it is whole
                slices[parameter] = cuts[module](attribute, value)
        vars(module).pop(GONE, None)
    for parameter, value in slices.items():
        _give(parameter, value)


def _give(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter its values; it stays the same object, for those who share it."""
    if parameter.is_meta:
        swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
        swap(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        parameter.data.copy_(value)


def make_buffers(model: nn.Module, device: torch.device) -> list[str]:
    """Give buffers memory, whose values come with those of their module's parameters; return the modules' names."""
    found = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                found.append(path)
    return list(dict.fromkeys(found))


@torch.no_grad()
def draw(model: nn.Module, name: str, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return first values of a module's own parameters, by attribute; its buffers get theirs in place.

    The parameters themselves stay as they are.
    """
    call = _draws(model, name, module)
    if call is None or not (module._parameters or module._buffers):
        return {}
    held = [name for name, old in module._parameters.items() if old is not None]
    if not held and not any(True for _ in module.buffers(recurse=False)) and _gone(module) and _by_name(model):
        return {}
    with _lent(module, device) as lent:
        call()
    return {name: lent[name] for name in held}


def _gone(module: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = vars(module).get(GONE, {})
    return found


def _by_name(model: nn.Module) -> bool:
    """Tell whether the model draws every module from its name alone; otherwise each draw moves torch's generator."""
    return callable(getattr(model, "initialise", None))


def _draws(model: nn.Module, name: str, module: nn.Module) -> Callable[[], object] | None:
    """Return what draws a module's values, if anything does."""
    whole = getattr(model, "initialise", None)
    if callable(whole):
        return lambda: whole(name, module)
    for attribute in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, attribute, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


@contextmanager
def _lent(module: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Put memory under a module's own parameters, and where others are gone, for the length of a ``with`` block."""
    parameters, buffers = dict(module._parameters), set(module._buffers)
    lent: dict[str, Tensor] = {}
    try:
        for name, old in [*parameters.items(), *_gone(module).items()]:
            if old is None:
                continue
            if name in buffers:
                module._buffers[name] = torch.zeros_like(old, device=device)
                continue
            empty = torch.empty(old.shape, dtype=old.dtype, device=device)
            memory = nn.Parameter(empty, requires_grad=old.requires_grad)
            lent[name] = memory.detach()
            module._parameters[name] = memory
        yield lent
    finally:
        module._parameters.update(parameters)
        module._buffers.update({name: None for name in _gone(module) if name in buffers})
