"""Hooks of a worker's module and its one optimizer, its state in checkpoints, and detection of a program's writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import ModuleHook, after_gradient
from hpctrain.parallel.model_agreement import trainable

Call = Callable[[], None]


class WorkerHooks:
    """Hooks of one worker; ``optimizer`` is the worker's optimizer, once it is known."""

    def __init__(
        self,
        model: nn.Module,
        on_forward: Call,
        on_gradient: Call,
        on_unknown_optimizer: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Call ``on_forward`` before each forward pass, and ``on_gradient`` after each parameter's gradient.

        ``on_unknown_optimizer`` is called before the first step of an optimizer of the model that
        was not passed to ``attach_optimizer``: a script without a run. Otherwise its workers would
        never exchange.
        """
        self.optimizer: torch.optim.Optimizer | None = None
        self._held = {id(parameter) for _, parameter in trainable(model)}
        self._on_gradient, self._on_unknown_optimizer = on_gradient, on_unknown_optimizer
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(ModuleHook(lambda *_: on_forward()))]
        for _, parameter in trainable(model):
            self._handles.append(after_gradient(parameter, self._after_gradient))
        hook = weakref.WeakMethod(self._on_any_step)  # the hook is global in torch and must not keep the model alive
        self._handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _call(hook(), optimizer)))

    def _after_gradient(self, parameter: Tensor) -> None:
        self._on_gradient()

    def _on_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer is None:
            given = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if any(id(parameter) in self._held for parameter in given):
                self._on_unknown_optimizer(optimizer)

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the first one. Raises ``UsageError`` for a second one."""
        if self.optimizer is optimizer:
            return False
        if self.optimizer is not None:
            raise UsageError("a worker moves by one optimizer: call job.wrap(model) again for another", everywhere=True)
        return True

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, on_step_begin: Call, on_step_end: Call) -> None:
        """Call ``on_step_begin`` before each of the optimizer's steps, and ``on_step_end`` after it."""
        self.optimizer = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: on_step_begin()),
            optimizer.register_step_post_hook(lambda *_: on_step_end()),
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


# State of a worker in checkpoints ------------------------------------------------------------------------------------


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint contains, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: one for name, one in model.named_buffers() if name in saved}


def worker_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a worker's buffers and the tensors of its optimizer states, under separate names."""
    found = {f"buffer.{name}": one for name, one in buffers_of(model).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[parameter]}.{key}"] = value
    return found


# Detection of a program's writes to parameters that come from servers or from a centre --------------------------------
#
# The next step, or the end of the run, overwrites such parameters, so a program's writes would be
# lost silently. ``job.unshard(model, write=True)`` is the supported way to write.


_ADVICE = "allowed is, on all ranks, with job.unshard(model, write=True): ..., in which rank 0's values count"


class WriteGuard:
    """Guard against a program's writes to parameters where they would be lost; ``source`` names their source."""

    def __init__(self, model: nn.Module, source: str) -> None:
        self._source = source
        self._parameters = trainable(model)
        self._versions: list[int] = []
        self.allowed = False  # whether writes count
        modules: list[Any] = list(model.modules())
        self._handles: list[RemovableHandle] = [
            module.register_load_state_dict_pre_hook(ModuleHook(self._on_load)) for module in modules
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def allowing(self) -> Iterator[None]:
        """Let the program write in the ``with`` block."""
        before, self.allowed = self.allowed, True
        try:
            yield
        finally:
            self.allowed = before

    def record(self) -> None:
        """Record the current versions of the parameters as valid."""
        self._versions = [parameter._version for _, parameter in self._parameters]

    def check(self) -> None:
        """Raise ``UsageError`` if the program has changed parameters in place since ``record``."""
        now = [parameter._version for _, parameter in self._parameters]
        if not self._versions or now == self._versions:
            return
        changed = [name for (name, _), one, other in zip(self._parameters, now, self._versions) if one != other]
        self._versions = now
        raise UsageError(
            f"parameters {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''} were changed in place by the "
            f"program: they come from {self._source}, and the change would be lost; {_ADVICE}"
        )

    def _on_load(self, *_: Any) -> None:
        if not self.allowed:
            raise UsageError(
                f"load_state_dict of a model whose parameters come from {self._source}: what it loads would be lost; "
                f"{_ADVICE}; or load before job.wrap(model)"
            )
