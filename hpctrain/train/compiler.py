"""Deferred import of torch's compiler: it is loaded when a program first uses it.

torch's optimizers import the compiler on first use (1.2 s on every rank, more if ranks outnumber
cores), only to exclude themselves from tracing: they call ``disable`` and ``graph_break``. While
the compiler is not loaded, no tracing can be active. Until then, a stub replaces ``torch._dynamo``:
``disable`` returns the function unchanged, and ``graph_break`` does nothing, like the real function
outside of a trace. Access to any other attribute loads the real module, which replaces the stub.
Functions that the stub did not disable are then disabled at their next call. Activation checkpoints
read a flag of ``torch._dynamo.config`` that only a trace needs, so the stub defines it. Loading the
compiler for this flag would cost 70 MB on every rank that recomputes activations.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # the attribute in which torch stores the disabled form of a function


def put_off() -> None:
    """Install the stub for the compiler, unless the compiler is already loaded."""
    if NAME not in sys.modules:
        import torch

        standin = _Standin(NAME)
        sys.modules[NAME] = standin
        setattr(torch, "_dynamo", standin)


class _Flags:
    """Flags of ``torch._dynamo.config`` that activation checkpoints read outside of a trace."""

    error_on_nested_fx_trace = True

    def __init__(self, standin: _Standin) -> None:
        self.__dict__["_standin"] = standin

    def __getattr__(self, name: str) -> Any:
        """Read any other flag from the real compiler."""
        return getattr(self._standin.load().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a flag of the real compiler."""
        setattr(self._standin.load().config, name, value)


class _Standin(ModuleType):
    """Stub for ``torch._dynamo`` for callers that only exclude themselves from tracing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_passed"] = weakref.WeakSet()  # checkpoints create new functions in each pass
        self.__dict__["config"] = _Flags(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the function unchanged: no trace is active."""
        self._passed.add(function)
        return function

    def __getattr__(self, name: str) -> Any:
        """Load the real compiler and return its attribute; the real module replaces the stub from now on."""
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return the real compiler, which replaces the stub."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # binds torch._dynamo, too
            for function in self._passed:
                function.__dict__.pop(_MARK, None)
        return sys.modules[NAME]
