"""Turns of interleaved candidates, their clock, and the signal that ends a benchmark between two turns.

The handlers of SIGTERM and SIGINT only set a flag, on which the ranks agree before each turn.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from hpctrain.comm.communicator import Communicator
from hpctrain.util.text import format_seconds

Value = TypeVar("Value")

LINE_EVERY = 10.0  # seconds between two lines of progress


class Stopped(Exception):
    """SIGTERM or SIGINT has arrived: write what was measured, and end."""


class StopFlag:
    """Signal by which this benchmark ends.

    Ranks act only on a signal that all of them know: else one would leave a collective to the others.
    """

    def __init__(self) -> None:
        self._arrived = self._agreed = 0
        self._has_ranks = False

    @property
    def number(self) -> int:
        """Return the number of the signal; 0 if none has arrived, or if the other ranks do not know it yet."""
        return self._agreed if self._has_ranks else self._arrived

    def install(self) -> None:
        """Install the handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.arrive)

    def check(self, comm: Communicator | None = None) -> None:
        """Raise ``Stopped`` if a signal has arrived; with ``comm``, on all ranks if one of them has it. Collective."""
        if comm is not None:
            self._has_ranks = True
            self._agreed = self._agreed or max(comm.all_gather_object(self._arrived))
        if self.number:
            raise Stopped

    def arrive(self, number: int, _: object = None) -> None:
        """Note a signal, as its handler."""
        self._arrived = number

    def forget(self) -> None:
        """Return to the state before any signal and exchange."""
        self._arrived = self._agreed = 0
        self._has_ranks = False


stop = StopFlag()
until_stopped = suppress(Stopped)  # ends a block at a signal; what it has measured so far stays


def announce(text: str, comm: Communicator | None = None) -> None:
    """Print a line of progress, on rank 0."""
    if comm is None or comm.rank == 0:
        print(f"{text} ...", file=sys.stderr, flush=True)


def interleave(
    turns: Mapping[str, Callable[[int], Value]],
    rounds: int,
    *,
    warmup: int = 1,
    comm: Communicator | None = None,
    rotate: bool = False,
    every: Mapping[str, int] | None = None,
    what: str = "",
) -> dict[str, list[Value]]:
    """Call candidates in turn, with the number of the round; return their results, without those of the warm-up.

    Drift of the machine thus affects all candidates. The order of a round is drawn at random, the
    same on all ranks; with ``rotate``, every round begins with the next candidate, because the
    successor of a slow one finds cold caches. A candidate in ``every`` takes part in only one of so
    many rounds. A signal ends the turns. Collective.
    """
    found: dict[str, list[Value]] = {name: [] for name in turns}
    names, every, draw = list(turns), every or {}, random.Random(0)
    progress = Progress(what, warmup + rounds, comm)
    with until_stopped:
        for number in range(warmup + rounds):
            first = number % max(len(names), 1)
            for name in [*names[first:], *names[:first]] if rotate else draw.sample(names, len(names)):
                # The warm-up and the first round include all, so that each has at least one result.
                if number > warmup and number % every.get(name, 1):
                    continue
                stop.check(comm)
                result = turns[name](number)
                if number >= warmup:
                    found[name].append(result)
            progress(number + 1)
    return found


class Progress:
    """Lines about the progress of long work, on rank 0."""

    def __init__(self, what: str, total: int, comm: Communicator | None = None) -> None:
        self._what, self._total = what, total
        self._shown = bool(what) and (comm is None or comm.rank == 0)
        self._began = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if self._shown and now - self._last >= LINE_EVERY and 0 < done < self._total:
            self._last = now
            left = (now - self._began) / done * (self._total - done)
            announce(f"{self._what}: {done} of {self._total}, ETA {format_seconds(left)}")


def timed(action: Callable[[], object], comm: Communicator | None = None) -> float:
    """Return the seconds of an action that all ranks start together, without garbage collection."""
    gc.collect()
    with no_garbage_collection():
        if comm is not None:
            comm.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
