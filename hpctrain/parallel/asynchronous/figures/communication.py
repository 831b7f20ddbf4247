"""Fraction of a worker's time that it spends on exchanges with other workers.

    with exchanging:
        ...

Note: which time is measured. It runs from the first pass of a step to the first pass of the next
step, so it includes waits for samples. A meeting pauses it until the next pass. Waits for the
slowest worker in a meeting, evaluations and checkpoint writes are therefore excluded.
"""

from __future__ import annotations

import time
from types import TracebackType

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.strategy import Figures

_monotonic = time.monotonic


class CommunicationTime:
    """Seconds inside ``with`` blocks, which enclose every exchange, and total seconds of steps."""

    __slots__ = ("_entered", "_since", "_spent", "_passed")

    def __init__(self) -> None:
        self._entered = 0.0
        self._since: float | None = None  # start of the current step; None outside a step
        self._spent = self._passed = 0.0

    def begin_step(self) -> None:
        """Record that the first pass of a step begins."""
        now = _monotonic()
        if self._since is not None:
            self._passed += now - self._since
        self._since = now

    def pause(self) -> None:
        """Stop the measurement until the next step begins."""
        if self._since is not None:
            self._passed += _monotonic() - self._since
        self._since = None

    def __enter__(self) -> None:
        self._entered = _monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._spent += _monotonic() - self._entered

    def figures(self, comm: Communicator, *, works: bool = True) -> Figures:
        """Return the fraction, from 0 to 1, as the mean of all workers, and reset it. Collective."""
        self.pause()
        own = self._spent / self._passed if works and self._passed else None
        self._spent = self._passed = 0.0
        shares = [share for share in comm.all_gather_object(own) if share is not None]
        return {"communication": min(sum(shares) / len(shares), 1.0) if shares else 0.0}
