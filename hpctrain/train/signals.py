"""Turn signals into a wish that the ranks agree on at the end of a step. Standard library only.

Installed before torch is imported: until then a signal's default action would kill the rank.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

# The batch system's early warning (``--signal=USR1@300``), and its last one.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopRequest:
    """Hold whether a signal has asked this rank to save and leave; handlers only set this flag."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def name(self) -> str | None:
        """Return the signal's name, None where none has come."""
        return signal.Signals(self.signal).name if self.signal else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


stop_request = StopRequest()


def install() -> StopRequest:
    """Catch the signals from now on; a process whose main thread runs elsewhere keeps its own handlers."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, stop_request._on_signal)
    return stop_request
