"""Let a worker come at the moments of a step: by hooks of its module, and of its one optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.module_hooks import ModuleHook
from hpctrain.parallel.strategy import trainable

Call = Callable[[], None]


class Hooks:
    """Hold the hooks of one worker; ``optimizer`` is the one that moves it, once it is known."""

    def __init__(self, model: nn.Module, pass_comes: Call, gradient_came: Call) -> None:
        """Call ``pass_comes`` before each forward pass, and ``gradient_came`` after each parameter's gradient."""
        self.optimizer: torch.optim.Optimizer | None = None
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(ModuleHook(lambda *_: pass_comes()))]
        for _, parameter in trainable(model):
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(lambda _: gradient_came()))

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is the first one; raise ``UsageError`` for a second."""
        if self.optimizer is optimizer:
            return False
        if self.optimizer is not None:
            raise UsageError("a worker moves by one optimizer: call job.wrap(model) again for another", everywhere=True)
        return True

    def take(self, optimizer: torch.optim.Optimizer, move_comes: Call, move_was: Call) -> None:
        """Call ``move_comes`` before each of the optimizer's moves, and ``move_was`` after it."""
        self.optimizer = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: move_comes()),
            optimizer.register_step_post_hook(lambda *_: move_was()),
        ]

    def remove(self) -> bool:
        """Take all hooks off; tell whether there were any."""
        attached = bool(self._handles)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return attached

    @property
    def attached(self) -> bool:
        """Tell whether the hooks are on."""
        return bool(self._handles)
