"""Hooks that strategies register on a program's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo


class ModuleHook:
    """A hook of one module: copies and files of the module get one that does nothing.

    It runs between compiled graphs, never inside of them: it communicates, and exchanges the module's parameters.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:  # torch writes to its attributes, which a bound method refuses
            return function(*args, **kwargs)

        self._function = _disable_dynamo(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing."""
        return _NoHook, ()


class _NoHook:
    """A hook that does nothing, in copies of a module that has a strategy."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, for what it returned; any other module as it is."""
    inner = model._modules.get("_orig_mod")
    return inner if inner is not None and type(model).__name__ == "OptimizedModule" else model
