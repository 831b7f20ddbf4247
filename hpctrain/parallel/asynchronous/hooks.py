"""Hooks of a worker's module and its one optimizer, at the phases of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.module_hooks import ModuleHook, after_gradient
from hpctrain.parallel.strategy import trainable

Call = Callable[[], None]


class Hooks:
    """Hooks of one worker; ``optimizer`` is the worker's optimizer, once it is known."""

    def __init__(
        self,
        model: nn.Module,
        pass_comes: Call,
        gradient_came: Call,
        unknown_steps: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Call ``pass_comes`` before each forward pass, and ``gradient_came`` after each parameter's gradient.

        ``unknown_steps`` is called before the first step of an optimizer of the model that was not
        passed to ``take``: a script without a run. Otherwise its workers would never exchange.
        """
        self.optimizer: torch.optim.Optimizer | None = None
        self._held = {id(parameter) for _, parameter in trainable(model)}
        self._gradient_came, self._unknown_steps = gradient_came, unknown_steps
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(ModuleHook(lambda *_: pass_comes()))]
        for _, parameter in trainable(model):
            self._handles.append(after_gradient(parameter, self._gradient_of))
        own = weakref.WeakMethod(self._any_steps)  # the hook is global in torch and must not keep the model alive
        self._handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _call(own(), optimizer)))

    def _gradient_of(self, parameter: Tensor) -> None:
        self._gradient_came()

    def _any_steps(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer is None:
            given = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if any(id(parameter) in self._held for parameter in given):
                self._unknown_steps(optimizer)

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the first one. Raises ``UsageError`` for a second one."""
        if self.optimizer is optimizer:
            return False
        if self.optimizer is not None:
            raise UsageError("a worker moves by one optimizer: call job.wrap(model) again for another", everywhere=True)
        return True

    def take(self, optimizer: torch.optim.Optimizer, move_comes: Call, move_was: Call) -> None:
        """Call ``move_comes`` before each of the optimizer's steps, and ``move_was`` after it."""
        self.optimizer = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: move_comes()),
            optimizer.register_step_post_hook(lambda *_: move_was()),
        ]

    def remove(self) -> bool:
        """Remove all hooks; return whether there were any."""
        attached = bool(self._handles)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return attached

    @property
    def attached(self) -> bool:
        """Return whether the hooks are registered."""
        return bool(self._handles)


def _call(method: Callable[[torch.optim.Optimizer], None] | None, optimizer: torch.optim.Optimizer) -> None:
    if method is not None:
        method(optimizer)
