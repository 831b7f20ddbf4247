"""Times of a step by what they were used for: loading, passes, updates, checkpoints, evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from hpctrain import trace
from hpctrain.comm.transport.waiting import waiting
from hpctrain.parallel.hooks import around_forward, before_backward

Calls = Callable[..., Any]


class StepTimes:
    """Seconds of the step in progress, without waits for other ranks: these are counted as communication.

    The forward pass of a model is its call, and its backward pass what autograd computes from the first gradient
    of its outputs on; where the library makes these passes itself, they include the loss.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._seconds: dict[str, float] = {}
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Calls]] = []

    def attach(self) -> None:
        """Time the passes of the models until ``detach``."""
        trace.clock = trace.PassClock(lambda: waiting.total)
        for model in self._models:
            compiled: Calls | None = model._compiled_call_impl
            if compiled is None:
                self._handles += around_forward(model, _begin_forward, _end_forward)
            else:  # a hook would be compiled, too
                self._compiled.append((model, compiled))
                model._compiled_call_impl = _timed(compiled)

    def detach(self) -> None:
        trace.clock = None
        for handle in self._handles:
            handle.remove()
        for model, compiled in self._compiled:
            model._compiled_call_impl = compiled
        self._handles, self._compiled = [], []

    @contextmanager
    def counted(self, use: str) -> Iterator[None]:
        """Count the time of the ``with`` block as that of a use."""
        began, waited = time.monotonic(), waiting.total
        try:
            yield
        finally:
            self.add(use, time.monotonic() - began - (waiting.total - waited))

    def add(self, use: str, seconds: float) -> None:
        self._seconds[use] = self._seconds.get(use, 0.0) + max(seconds, 0.0)

    def begin_step(self) -> None:
        """Forget passes that have not ended, because of an error, or do not belong to a step."""
        if trace.clock is not None:
            trace.clock.take()

    def take(self) -> dict[str, float]:
        """Return the seconds of each use since the last call, as values of a row of metrics."""
        found, self._seconds = self._seconds, {}
        passes = trace.clock.take() if trace.clock is not None else {}
        uses = {use: passes.get(use, found.get(use, 0.0)) for use in ("data", *trace.PASSES, "optimizer")}
        uses |= {use: found[use] for use in ("save", "evaluation") if use in found}
        return {f"{use}_seconds": round(seconds, 6) for use, seconds in uses.items()}


def _begin_forward(args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled():
        trace.begin_pass("forward")


def _end_forward(args: Any, kwargs: Any, result: Any) -> None:
    if torch.is_grad_enabled():
        trace.end_pass("forward")
        before_backward(result, _begin_backward)


def _begin_backward() -> None:
    trace.begin_pass("backward")
    engine: Any = Variable._execution_engine
    engine.queue_callback(lambda: trace.end_pass("backward"))


def _timed(call: Calls) -> Calls:
    """Return the call of a compiled model with its time counted."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        _begin_forward(args, kwargs)
        result = None
        try:
            result = call(*args, **kwargs)
        finally:
            _end_forward(args, kwargs, result)
        return result

    return timed
