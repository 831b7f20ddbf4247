"""Signal handlers that set a stop request, on which the ranks agree at the end of a step. Standard library only.

They are installed before torch is imported: before that, a signal's default action kills the rank.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpctrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

# The batch system's early warning (``--signal=USR1@300``), and its final one.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
ASKED_BY = "HPCTRAIN_ASKED_BY"  # USR1: the job script passes every end of the job to the ranks as SIGUSR1, too


class Terminated(KeyboardInterrupt):
    """SIGTERM before a run has begun: no state can be saved yet, and the start may take minutes."""


def told_and_code(kind: type[BaseException]) -> tuple[str, int]:
    """Return the message for a ``KeyboardInterrupt`` that ends a rank, and the exit code."""
    if issubclass(kind, Terminated):
        return "terminated before the run has begun, nothing to save", EXIT_TERMINATED
    return "interrupted", EXIT_INTERRUPTED


class StopRequest:
    """Request by a signal that this rank saves and exits; the signal handlers only set this flag.

    SIGTERM without SIGUSR1: ``srun --kill-on-bad-exit`` sends SIGTERM when a rank has died, and
    SIGKILL half a minute later (KillWait). The other ranks wait in MPI for the dead rank, where
    Python runs no handlers. This SIGTERM cannot be distinguished from the SIGTERM of ``scancel``,
    after which there is time to save. The job scripts therefore pass on every end of the job as
    SIGUSR1 and announce this in ``HPCTRAIN_ASKED_BY``. A SIGTERM without SIGUSR1 then means that a
    rank has died. The watchdog reads the signals from a pipe, which receives them wherever the main
    thread is.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.starting = False  # while there is no state to save, SIGTERM ends the job at once
        self._raised: type[KeyboardInterrupt] | None = None
        self._pipe: int | None = None
        self._terminated: float | None = None
        self._asked = False

    @property
    def name(self) -> str | None:
        """Return the signal's name, None if no signal has arrived."""
        return signal.Signals(self.signal).name if self.signal else None

    def alone(self) -> float:
        """Return the seconds since SIGTERM arrived without SIGUSR1; 0.0 if none arrived or SIGUSR1 is not passed on."""
        if self._pipe is None:
            return 0.0
        for number in self._arrived(self._pipe):
            self._asked |= number == signal.SIGUSR1
            if number == signal.SIGTERM and self._terminated is None:
                self._terminated = time.monotonic()
        return 0.0 if self._asked or self._terminated is None else time.monotonic() - self._terminated

    def listen(self) -> None:
        """Write arriving signals to a pipe, unless the program already uses a wakeup descriptor."""
        if self._pipe is not None:
            return
        self._pipe, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def _arrived(self, pipe: int) -> bytes:
        try:
            return os.read(pipe, 4096)
        except BlockingIOError:
            return b""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self.starting and number == signal.SIGTERM:
            self._raise(Terminated)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._raise(KeyboardInterrupt)

    def _raise(self, kind: type[KeyboardInterrupt]) -> None:
        self._raised = kind
        raise kind

    def raise_lost_interrupt(self) -> None:
        """Raise ``KeyboardInterrupt`` if one was raised earlier and was lost.

        Python drops exceptions in weak reference callbacks and in ``__del__``, which run while
        modules are imported and models are built. Without this check, the rank would continue to
        train after an interrupt.
        """
        if self._raised is not None:
            raise self._raised


stop_request = StopRequest()


def install() -> StopRequest:
    """Install the signal handlers. If this is not the main thread, the process keeps its own handlers.

    SIGINT raises ``KeyboardInterrupt`` as usual, and the interrupt is recorded.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, stop_request._on_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, stop_request._on_interrupt)
        if os.environ.get(ASKED_BY) == "USR1":
            stop_request.listen()
        atexit.unregister(_ignore)
        atexit.register(_ignore)
    return stop_request


@contextmanager
def starting() -> Iterator[None]:
    """Let SIGTERM end the job at once in the ``with`` block: no state computed there could be saved."""
    before, stop_request.starting = stop_request.starting, True
    try:
        yield
        stop_request.raise_lost_interrupt()
    finally:
        stop_request.starting = before


def _ignore() -> None:
    """Ignore the signals during interpreter shutdown, when Python would restore their default action.

    srun and other launchers end all ranks as soon as one rank has exited with a nonzero code. A
    rank that is exiting with the same code (2: bad input, 75: saved) must not be killed by that
    signal: the job's exit code would be that of the signal.
    """
    for number in SIGNALS:
        if signal.getsignal(number) == stop_request._on_signal:
            signal.signal(number, signal.SIG_IGN)
