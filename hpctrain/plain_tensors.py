"""Blocks of code that compute with this rank's parts of parameters as they are.

Between the passes of a program, parameters that are split over ranks refuse what would need all of their elements (see
``parallel.guard``). The library itself, which knows what it holds, is not to be asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

plain_tensors = torch._C.DisableTorchFunctionSubclass  # ``with plain_tensors():``
guarded_tensors = torch._C._EnableTorchFunction  # inside of it, for what the program has written


def as_parts(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute with parts as they are; not for generators."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with plain_tensors():
            return function(*args, **kwargs)

    return called
