"""Measure which share of its time a worker spends on what it has in common with the others.

    with exchanging:
        ...

Note: which time. It runs from the first pass of a step to that of the next one, so a wait for samples is part of it. A
meeting stops it until the first pass after it: waits for the slowest worker there, evaluations and the writing of
checkpoints are no part of a step.
"""

from __future__ import annotations

import time
from types import TracebackType

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.strategy import Figures

_monotonic = time.monotonic


class CommunicationTime:
    """Add up the seconds inside ``with`` blocks, which stand around every exchange, and those that passed in all."""

    __slots__ = ("_entered", "_since", "_spent", "_passed")

    def __init__(self) -> None:
        self._entered = 0.0
        self._since: float | None = None  # when the present step began; None while no step does
        self._spent = self._passed = 0.0

    def begin_step(self) -> None:
        """Note that the first pass of a step comes."""
        now = _monotonic()
        if self._since is not None:
            self._passed += now - self._since
        self._since = now

    def pause(self) -> None:
        """Note that no step goes on until the next one begins."""
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
        """Return the share, from 0 to 1, as the mean of all workers, and begin anew; a call by all ranks."""
        self.pause()
        own = self._spent / self._passed if works and self._passed else None
        self._spent = self._passed = 0.0
        shares = [share for share in comm.all_gather_object(own) if share is not None]
        return {"communication": min(sum(shares) / len(shares), 1.0) if shares else 0.0}
