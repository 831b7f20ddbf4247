"""Hooks before and after every optimizer step of the process.

Note: torch stores such hooks in a dict that it iterates over at each step. If the garbage collector
frees an owner meanwhile, that owner must not remove its hooks from the dict ("OrderedDict mutated
during iteration"). Therefore torch gets one permanent hook of each kind, and these iterate over a
copy of the list of owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Call = Callable[[Any, torch.optim.Optimizer], None]  # arguments: owner and optimizer

_hooks: list[UpdateHooks] = []
_registered = False


class UpdateHooks:
    """Registered ``before(owner, optimizer)`` and ``after(owner, optimizer)``, until removed or the owner is freed."""

    def __init__(self, owner: Any, before: Call | None = None, after: Call | None = None) -> None:
        global _registered
        self.owner, self.before, self.after = weakref.ref(owner), before, after
        _hooks.append(self)
        if not _registered:
            _registered = True
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)

    def remove(self) -> None:
        """Unregister the hooks."""
        if self in _hooks:
            _hooks.remove(self)


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hooks in list(_hooks):
        owner = hooks.owner()
        if owner is None:
            hooks.remove()
        elif hooks.before is not None:
            hooks.before(owner, optimizer)


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hooks in list(_hooks):
        if hooks.after is not None and (owner := hooks.owner()) is not None:
            hooks.after(owner, optimizer)
