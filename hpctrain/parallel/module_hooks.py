"""Hooks that strategies register on a program's modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle


class ModuleHook:
    """Hook of one module; copies and pickles of the module get a hook that does nothing.

    It runs between compiled graphs, never inside them: it communicates, and replaces the module's
    parameters.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:  # torch sets attributes on it, which a bound method does not allow
            return function(*args, **kwargs)

        self._function = _disable_dynamo(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a hook that does nothing, for copies and pickles."""
        return _NoHook, ()


class _NoHook:
    """Hook that does nothing, in copies of a module with a strategy."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def after_gradient(parameter: Tensor, method: Callable[..., None], *args: int | str) -> RemovableHandle:
    """Call the bound ``method`` with ``args`` and the parameter whenever autograd has accumulated its gradient.

    Python's garbage collector does not traverse the references of such a hook. Therefore the hook
    must not hold a reference to its owner, nor ``args`` to the parameter: a model and its strategy
    would never be freed.
    """
    owned = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        own = owned()
        if own is not None:
            own(*args, parameter)

    # Use torch's own method: the parameter's attribute of the same name defers hooks.
    register: Callable[..., RemovableHandle] = Tensor.register_post_accumulate_grad_hook
    return register(parameter, hook)


def plain_module(model: nn.Module) -> nn.Module:
    """Return the original module of a ``torch.compile`` wrapper; any other module unchanged."""
    inner = model._modules.get("_orig_mod")
    return inner if inner is not None and type(model).__name__ == "OptimizedModule" else model
