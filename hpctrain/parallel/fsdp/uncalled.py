"""Search for modules that are never called: hooks on them would never run.

Such modules have no ``forward``, or other modules read their parameters.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def uncalled(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules inside a model that are never called, each with the reason and the name to use instead.

    These are modules without a ``forward`` (``ModuleList``, ``ModuleDict``, ``ParameterList``), and
    the modules inside a ``MultiheadAttention``, which reads the weight of its projection.
    Parametrizations are included too, because they run when a weight is read.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if not has_forward(module):
            found.setdefault(module, f"never runs, being a {type(module).__name__}: name its members, '{_below(name)}'")
        for part in _parts_read(module):
            found[part] = f"is read by the {type(module).__name__} around it and never called: name that, {name!r}"
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a ``forward`` method."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _below(name: str) -> str:
    return f"{name}.*" if name else "*"


def _parts_read(module: nn.Module) -> list[nn.Module]:
    """Return all modules inside ``module`` if it reads their parameters directly."""
    if isinstance(module, nn.MultiheadAttention):
        return [part for part in module.modules() if part is not module]
    if parametrize.is_parametrized(module):
        parametrizations = module.parametrizations
        assert isinstance(parametrizations, nn.Module)
        return list(parametrizations.modules())
    return []
