"""Put off the import of torch's compiler until somebody compiles.

Note: a stand-in for ``torch._dynamo``. torch's optimizers import the compiler when they are first used (1.2 s on every
rank, more where ranks outnumber cores) only to tell it to stay away, in case it is tracing: they call ``disable`` and
``graph_break``. While it is not loaded nobody can be tracing, so until then a stand-in answers: ``disable`` returns the
function as it is, ``graph_break`` does nothing, as the real one outside of a trace. Whoever asks for anything else gets
the real module, which takes the stand-in's place, and what was not disabled meanwhile is disabled at its next call.
"""

from __future__ import annotations

import importlib
import sys
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


class _Standin(ModuleType):
    """Be ``torch._dynamo`` for those who only want it to stay away."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_passed"] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the function: nothing is traced."""
        self._passed.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        """Load the real compiler and let it answer, this time and from now on."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # binds torch._dynamo, too
            for function in self._passed:
                function.__dict__.pop(_MARK, None)
        return getattr(sys.modules[NAME], name)
