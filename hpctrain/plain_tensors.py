"""Access to this rank's shards of parameters without the guard of split parameters.

Between forward and backward passes, parameters that are split over ranks refuse operations that
need all of their elements (see ``parallel.guard``). The library itself knows the shards, so its own
code runs without this check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

plain_tensors = torch._C.DisableTorchFunctionSubclass  # usage: ``with plain_tensors():``
guarded_tensors = torch._C._EnableTorchFunction  # nested inside it, for code of the program


def on_shards(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it computes with shards as they are; not for generators."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with plain_tensors():
            return function(*args, **kwargs)

    return called
