"""Give models that were built on the meta device their memory and their first values, a module at a time.

A module draws its values by ``reset_parameters()``, as torch's own do; or the model draws them, by a method
``initialise(name, module)`` that is called with the module and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError


def is_meta(model: nn.Module) -> bool:
    """Tell whether any parameter or buffer has no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_drawable(model: nn.Module) -> None:
    """Raise ``UsageError`` for a module with parameters or buffers on the meta device that nobody can draw."""
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own) and _draws(model, name, module) is None:
            raise UsageError(
                f"module {name or 'of the whole model'} of class {type(module).__name__} is on the meta device and has "
                "no reset_parameters() to draw its values: write one, or give the model initialise(name, module)",
                everywhere=True,
            )


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a whole model its memory and its values, in place."""
    check_drawable(model)
    if not is_meta(model):
        return
    make_buffers(model, device)
    for name, module in reversed(list(model.named_modules())):  # of a tied parameter the first owner has the last word
        drawn = draw(model, name, module, device)
        for attribute, value in drawn.items():
            old = module._parameters[attribute]
            assert old is not None
            if old.is_meta:  # the same object stays, for those who share it
                swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
                swap(old, nn.Parameter(value, requires_grad=old.requires_grad))
            else:
                old.data.copy_(value)


def make_buffers(model: nn.Module, device: torch.device) -> list[str]:
    """Give buffers memory, whose values come with those of their module's parameters; return the modules' names."""
    found = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
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
    with _lent(module, device) as lent:
        call()
    return lent


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
    """Put memory under a module's own parameters for the length of a ``with`` block."""
    before = {name: old for name, old in module._parameters.items() if old is not None}
    lent: dict[str, Tensor] = {}
    try:
        for name, old in before.items():
            memory = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            lent[name] = memory.detach()
            module._parameters[name] = memory
        yield lent
    finally:
        module._parameters.update(before)
