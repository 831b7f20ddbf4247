"""Snapshots of a recomputed module's mutable inputs: key-value caches, lists, tables."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

# Never copied, because their identity matters or they are immutable.
_SHARED = (
    torch.Tensor,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.Generator,
)
_CONSTANT = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def snapshot(value: Any) -> Any:
    """Return a copy of a nest of objects that shares its tensors and modules; return immutable values unchanged.

    An example is a decoder's key-value cache: layers append to it, or check whether they have
    filled it. The second pass must find it in the same state as the first.
    """
    if isinstance(value, (*_SHARED, *_CONSTANT)):
        return value
    memo: dict[int, Any] = {}
    if not _collect(value, memo):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object that cannot be copied: torch reports a second pass that differs
        return value


def _collect(value: Any, shared: dict[int, Any]) -> bool:
    """Add all shared objects to ``shared``, by id; return whether the value contains mutable objects."""
    seen: set[int] = set()
    stack, changeable = [value], False
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, _CONSTANT):
            continue
        seen.add(id(one))
        if isinstance(one, _SHARED):
            shared[id(one)] = one
        elif isinstance(one, dict):
            changeable = True
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, (list, set)):
            changeable = True
            stack += list(one)
        elif isinstance(one, (tuple, frozenset)):
            stack += list(one)
        else:
            changeable = True
            stack += [*getattr(one, "__dict__", {}).values()]
            stack += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return changeable
