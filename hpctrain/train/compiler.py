"""Put off the import of torch's compiler until somebody compiles.

Note: a stand-in for ``torch._dynamo``. torch's optimizers import the compiler when they are first used (1.2 s on every
rank, more where ranks outnumber cores) only to tell it to stay away, in case it is tracing: they call ``disable`` and
``graph_break``. While it is not loaded nobody can be tracing, so until then a stand-in answers: ``disable`` returns the
function as it is, ``graph_break`` does nothing, as the real one outside of a trace. Whoever asks for anything else gets
the real module, which takes the stand-in's place, and what was not disabled meanwhile is disabled at its next call.
Activation checkpoints read a flag of ``torch._dynamo.config``, which only a trace needs: the stand-in has it. Loaded,
the compiler would cost every rank that recomputes 70 MB.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps the disabled form of a function


def put_off() -> None:
    """Let the stand-in answer for the compiler, unless that is loaded already."""
    if NAME not in sys.modules:
        import torch

        standin = _Standin(NAME)
        sys.modules[NAME] = standin
        setattr(torch, "_dynamo", standin)


class _Flags:
    """Flags of ``torch._dynamo.config`` that activation checkpoints ask for where nothing is traced."""

    error_on_nested_fx_trace = True

    def __init__(self, standin: _Standin) -> None:
        self.__dict__["_standin"] = standin

    def __getattr__(self, name: str) -> Any:
        """Ask the real compiler for any other."""
        return getattr(self._standin.load().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Tell the real compiler."""
        setattr(self._standin.load().config, name, value)


class _Standin(ModuleType):
    """Be ``torch._dynamo`` for those who only want it to stay away."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_passed"] = weakref.WeakSet()  # checkpoints give new functions in each pass
        self.__dict__["config"] = _Flags(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the function: nothing is traced."""
        self._passed.add(function)
        return function

    def __getattr__(self, name: str) -> Any:
        """Load the real compiler and let it answer, this time and from now on."""
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return the real compiler, which takes the stand-in's place."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # binds torch._dynamo, too
            for function in self._passed:
                function.__dict__.pop(_MARK, None)
        return sys.modules[NAME]
