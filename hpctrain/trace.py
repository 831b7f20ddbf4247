"""Recorder of the activities of this process over time, for a timeline of a few steps; almost free when off.

    with trace.span("forward", microbatch=3, chunk=1):
        ...

Times are seconds of ``time.monotonic``, which all processes of a node share. On a GPU a span is the
time at which work was submitted to the device, not the time at which the device executed it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_WORDS = {"reduce": "reduce", "send": "send", "recv": "receive", "device": "device"}  # by a substring of the operation
LIMIT = 200_000  # spans of one recording; later ones are only counted


@dataclass(frozen=True)
class Span:
    """Activity of one thread from ``start`` to ``end``."""

    name: str
    start: float
    end: float
    thread: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Recorded spans; ``dropped`` counts those beyond the limit."""

    spans: list[Span] = field(default_factory=list)
    dropped: int = 0


recording = False  # whether spans are recorded; tested before anything is computed for a span
_ranges: Any = None  # where spans are also ranges, as torch.cuda.nvtx
_spans: list[Span] = []
_limit, _dropped = LIMIT, 0


def start(limit: int = LIMIT, *, ranges: Any = None) -> None:
    """Start recording at most ``limit`` spans; spans that were recorded and not taken are discarded.

    Each ``with`` block is also a range of ``ranges``, such as ``torch.cuda.nvtx``, by ``range_push`` and ``range_pop``.
    """
    global recording, _spans, _limit, _dropped, _ranges
    _spans, _limit, _dropped, _ranges, recording = [], limit, 0, ranges, True


def take() -> Recording:
    """Stop recording and return the spans, in the order in which they ended."""
    global recording, _spans, _dropped, _ranges
    found, recording, _ranges = Recording(_spans, _dropped), False, None
    _spans, _dropped = [], 0
    return found


def add(name: str, began: float, ended: float, **facts: Any) -> None:
    """Record a span that the caller has timed, if recording is on."""
    global _dropped
    if not recording:
        return
    if len(_spans) < _limit:
        _spans.append(Span(name, began, ended, threading.get_ident(), facts))
    else:
        _dropped += 1


def wait(operation: str, began: float, ended: float) -> None:
    """Record a wait for other ranks, under a word for the operation: ``send``, ``receive``, ``reduce``, ``wait``."""
    word = next((word for part, word in _WORDS.items() if part in operation), "wait")
    add(word, began, ended, operation=operation)


def span(name: str, **facts: Any) -> AbstractContextManager[None]:
    """Record a ``with`` block as a span, under a name, with facts such as ``microbatch``."""
    return _Open(name, facts) if recording or clock is not None and name in _PASS_OF else _NOTHING


class _Open:
    """Span that has not ended; a class instead of a generator, which costs three times as much."""

    __slots__ = ("_name", "_facts", "_began", "_opened")

    def __init__(self, name: str, facts: dict[str, Any]) -> None:
        self._name, self._facts = name, facts

    def __enter__(self) -> None:
        self._opened = _ranges
        if self._opened is not None:
            self._opened.range_push(" ".join([self._name, *(f"{key}={fact}" for key, fact in self._facts.items())]))
        if self._name in _PASS_OF and clock is not None:
            clock.begin(_PASS_OF[self._name])
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        add(self._name, self._began, time.monotonic(), **self._facts)
        if self._name in _PASS_OF and clock is not None:
            clock.end(_PASS_OF[self._name])
        if self._opened is not None:
            self._opened.range_pop()


_NOTHING = nullcontext()


# Times of forward and backward passes, also when nothing is recorded --------------------------------------------------

PASSES = ("forward", "backward")
_PASS_OF = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "backward"}  # by span


class PassClock:
    """Sums of the seconds of forward and backward passes without waits; of nested passes, the outermost counts.

    ``waited`` returns the seconds for which this process has waited so far.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._seconds: dict[str, float] = {}
        self._depth = 0
        self._began = self._waited_before = 0.0

    def begin(self, kind: str) -> None:
        """Begin a pass of a kind, which is one of ``PASSES``."""
        if not self._depth:
            self._began, self._waited_before = time.monotonic(), self._waited()
        self._depth += 1

    def end(self, kind: str) -> tuple[float, float] | None:
        """End a pass; return when it began and ended, or None within another one."""
        if not self._depth:  # it began before ``take``
            return None
        self._depth -= 1
        if self._depth:
            return None
        ended = time.monotonic()
        seconds = ended - self._began - (self._waited() - self._waited_before)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + max(seconds, 0.0)
        return self._began, ended

    def take(self) -> dict[str, float]:
        """Return the seconds of each kind since the last call; passes that have not ended are forgotten."""
        found, self._seconds, self._depth = self._seconds, {}, 0
        return found


clock: PassClock | None = None  # if a run counts the time of passes


def begin_pass(kind: str) -> None:
    """Begin a pass that is not a ``with`` block."""
    if clock is not None:
        clock.begin(kind)


def end_pass(kind: str) -> None:
    """End a pass that is not a ``with`` block; unless it is within another one, it is a span."""
    if clock is not None and (times := clock.end(kind)) is not None:
        add(kind, *times)
