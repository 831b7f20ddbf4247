"""Events of operations for torch's profiler, as gloo has them: ``hpctrain:all_reduce``."""

# mypy: disable-error-code="no-any-return"
# TorchScript reads annotations at run time, and comments of mypy within functions as types.

import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_autograd: Any = torch.autograd
_jit: Any = torch.jit
_events: dict[int, "Event"] = {}  # events in progress that another thread will end
_numbers = itertools.count()


class Event:
    """Event of one operation, from the call to its end.

    torch marks an event as asynchronous if it ends in another thread, and gloo's events are marked: an
    operation overlaps others. The thread must have the profiler's state, which a fork of TorchScript
    inherits from the caller. Forks share a few threads: an event that finds none free at its start looks
    again at its end, and otherwise ends where it is.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._ended = threading.Event()
        self._record = torch._C._profiler._RecordFunctionFast(name, list(tensors))
        self._record.__enter__()
        self._fork: Any = None
        self._start_fork()

    def _start_fork(self) -> None:
        if len(_events) < torch.get_num_interop_threads():
            number = next(_numbers)
            _events[number] = self
            self._fork = _forking()(number)

    def end(self) -> None:
        """End the event; return when the profiler knows it."""
        self._ended.set()
        if self._fork is None and _autograd._profiler_enabled():
            self._start_fork()
        if self._fork is None:
            self.leave()
        else:
            self._fork.wait()

    def leave(self) -> None:
        """End the event in this thread, once the operation has ended."""
        self._ended.wait()
        self._record.__exit__(None, None, None)


def event(backend: str, operation: str, tensors: Sequence[Tensor]) -> Event | None:
    """Return a new event of a back end's operation, if a profiler is on."""
    return Event(f"{backend}:{operation}", tensors) if _autograd._profiler_enabled() else None


def _leave(number: int) -> int:
    _events[number].leave()
    del _events[number]
    return number


_leave = _jit.ignore(_leave)


def _call(number: int) -> int:
    return _leave(number)


def _fork(number: int) -> torch.jit.Future[int]:
    return _jit.fork(_call, number)


_compiled: Callable[[int], Any] | None = None


def _forking() -> Callable[[int], Any]:
    """Return the function that starts a fork; compiled at the first event."""
    global _compiled
    if _compiled is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which has no successor for forks
            _compiled = torch.jit.script(_fork)
    return _compiled
