"""Calls before and after every update that an optimizer of the process makes.

Note: torch keeps such hooks in a dict that it iterates over at each step. If the garbage collector frees an owner
meanwhile, that owner must not take its hooks out of the dict ("OrderedDict mutated during iteration"). So torch gets
one hook of each kind, for good, and these go through a copy of the list of owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Call = Callable[[Any, torch.optim.Optimizer], None]  # with the owner and the optimizer

_hooks: list[UpdateHooks] = []
_registered = False


class UpdateHooks:
    """Call ``before(owner, optimizer)`` and ``after(owner, optimizer)`` as long as the owner lives, until removed."""

    def __init__(self, owner: Any, before: Call | None = None, after: Call | None = None) -> None:
        global _registered
        self.owner, self.before, self.after = weakref.ref(owner), before, after
        _hooks.append(self)
        if not _registered:
            _registered = True
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)

    def remove(self) -> None:
        """End the calls."""
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
