"""Hooks that strategies register on a program's modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle


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


def after_gradient(parameter: Tensor, method: Callable[..., None], *args: int | str) -> RemovableHandle:
    """Call the bound ``method`` with ``args`` and the parameter whenever autograd has accumulated its gradient.

    Python's garbage collector does not see what such a hook of torch refers to. So the hook must not keep its owner,
    nor ``args`` the parameter: a model and its strategy would never be freed.
    """
    owned = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        own = owned()
        if own is not None:
            own(*args, parameter)

    # Torch's own: the parameter's defers.
    register: Callable[..., RemovableHandle] = Tensor.register_post_accumulate_grad_hook
    return register(parameter, hook)


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, for what it returned; any other module as it is."""
    inner = model._modules.get("_orig_mod")
    return inner if inner is not None and type(model).__name__ == "OptimizedModule" else model
