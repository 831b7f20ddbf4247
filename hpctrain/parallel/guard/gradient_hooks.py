"""Gradient hooks that a program registers on parameters, called with averaged gradients.

With one process, ``f`` of ``parameter.register_hook(f)`` receives the gradient of the whole batch.
On several ranks, autograd would call it on each rank with the gradient of that rank's share. The
result would differ unless ``f`` is linear (a clamp is not). If modules compute with other tensors
than the program holds (zero1, zero2, fsdp), autograd would not call it at all. Therefore the hooks
stay where torch stores them, in wrappers. A wrapper does nothing in the backward pass and is called
after the reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.guard.shard_tensor import mark_gradient
from hpctrain.plain_tensors import guarded_tensors, plain_tensors

_METHODS = ("register_hook", "register_post_accumulate_grad_hook")
ALTERNATIVE = "change the gradients behind the backward pass: with torch.no_grad(): parameter.grad.mul_(...)"


class GradientHooks:
    """Hooks on the ``parameters`` (by name) of a synchronous strategy, from the time of attachment.

    ``refused`` states why a strategy cannot call hooks; it is empty if it can.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], refused: str = "") -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        self._refused = refused
        self.hooked: dict[str, nn.Parameter] = {}  # with hooks to call
        for parameter in parameters.values():
            for method in _METHODS:
                parameter.__dict__[method] = _RegisterMethod(self, parameter, method)

    def take_over(self, name: str, before: Any, after: Any) -> None:
        """Defer the hooks that a program has set on the parameter ``name``: torch's dicts of both kinds, or None."""
        parameter = self._parameters[name]
        for hooks, attribute in ((before, "_backward_hooks"), (after, "_post_accumulate_grad_hooks")):
            keys = [key for key, hook in (hooks or {}).items() if not isinstance(hook, _DeferredHook)]
            if not keys:
                continue
            self._check()
            self.hooked[name] = parameter
            for key in keys:
                hooks[key] = _DeferredHook(hooks[key], parameter, name, accumulates=attribute != "_backward_hooks")
            if getattr(parameter, attribute) is not hooks:
                setattr(parameter, attribute, hooks)  # so that handle.remove() of the program still works

    def close(self) -> None:
        """Restore torch's own ``register_hook`` for later registrations."""
        for parameter in self._parameters.values():
            for method in _METHODS:
                parameter.__dict__.pop(method, None)

    def register(self, parameter: nn.Parameter, method: str, hook: Callable[..., Any]) -> Any:
        """Register a hook as torch does; it is called after the reduction."""
        self._check()
        name = self._names[id(parameter)]
        self.hooked[name] = parameter
        deferred = _DeferredHook(hook, parameter, name, accumulates=method == _METHODS[1])
        plain: Callable[..., Any] = getattr(torch.Tensor, method)
        with plain_tensors():
            return plain(parameter, deferred)

    def _check(self) -> None:
        if self._refused:
            raise UsageError(f"hook on a parameter: {self._refused}; {ALTERNATIVE}", everywhere=True)

    def check(self, agreed: Callable[[bool], bool]) -> None:
        """Raise ``UsageError`` on all ranks if a hooked parameter already has a gradient that others will be added to.

        ``agreed`` returns whether a condition is true on any rank. Collective among these ranks.
        """
        for name, parameter in self.hooked.items():
            deferred_hooks = parameter.grad is not None and _deferred_hooks(parameter._backward_hooks)
            if deferred_hooks and agreed(_adds_to_gradient(parameter)):
                raise _accumulation_error(name)

    def check_reduced(self, name: str) -> None:
        """Raise ``UsageError`` if the gradient of a hooked parameter stays unreduced on this rank."""
        if name in self.hooked and _deferred_hooks(self.hooked[name]._backward_hooks):
            raise _accumulation_error(name)

    def call(self, has_gradient: Callable[[str], bool]) -> None:
        """Call the hooks of all parameters that got an averaged gradient in this pass (``has_gradient``)."""
        for name, parameter in self.hooked.items():
            if parameter.grad is None or not has_gradient(name):
                continue
            gradient = reduced = mark_gradient(parameter)
            for hook in _deferred_hooks(parameter._backward_hooks):
                with guarded_tensors():
                    result = hook.call(gradient)
                gradient = gradient if result is None else result
            with plain_tensors(), torch.no_grad():
                if gradient is not reduced:
                    parameter.grad.copy_(gradient)
            for hook in _deferred_hooks(getattr(parameter, "_post_accumulate_grad_hooks", None)):
                with guarded_tensors():
                    hook.call(parameter)


class _RegisterMethod:
    """Replacement of ``register_hook`` of a parameter while its strategy is attached."""

    def __init__(self, hooks: GradientHooks, parameter: nn.Parameter, method: str) -> None:
        self._hooks, self._parameter, self._method = hooks, weakref.ref(parameter), method

    def __call__(self, hook: Callable[..., Any]) -> Any:
        parameter = self._parameter()
        assert parameter is not None
        return self._hooks.register(parameter, self._method, hook)

    def __reduce__(self) -> Any:
        return type(None), ()  # the copy of a parameter has no strategy


class _DeferredHook:
    """Wrapper of a hook that does nothing in a backward pass."""

    def __init__(self, hook: Callable[..., Any], parameter: nn.Parameter, name: str, *, accumulates: bool) -> None:
        self.call, self._parameter, self._name = hook, weakref.ref(parameter), name
        self._accumulates = accumulates

    def __call__(self, _: Tensor) -> None:
        parameter = self._parameter()
        if not self._accumulates and parameter is not None and _adds_to_gradient(parameter):
            raise _accumulation_error(self._name)


def _adds_to_gradient(parameter: nn.Parameter) -> bool:
    with plain_tensors():
        return parameter.grad is not None and bool(parameter.grad.any())


def _accumulation_error(name: str) -> UsageError:
    return UsageError(
        f"hook on parameter {name}: its gradient adds up over several backward passes, of which one process would give "
        f"each to the hook, and the ranks have only their sum; {ALTERNATIVE}",
        everywhere=True,
    )


def _deferred_hooks(hooks: Any) -> list[_DeferredHook]:
    return [hook for hook in (hooks or {}).values() if isinstance(hook, _DeferredHook)]
