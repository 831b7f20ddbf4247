"""Turn signals into a wish that the ranks agree on at the end of a step. Standard library only.

Installed before torch is imported: until then a signal's default action would kill the rank.
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

# The batch system's early warning (``--signal=USR1@300``), and its last one.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
ASKED_BY = "HPCTRAIN_ASKED_BY"  # USR1: whoever ends the job, SIGUSR1 comes to the ranks, too


class Terminated(KeyboardInterrupt):
    """SIGTERM before a run has begun: there is nothing to save, and the start may take minutes."""


def told_and_code(kind: type[BaseException]) -> tuple[str, int]:
    """Return what is said of a ``KeyboardInterrupt`` that ends a rank, and the exit code."""
    if issubclass(kind, Terminated):
        return "terminated before the run has begun, nothing to save", EXIT_TERMINATED
    return "interrupted", EXIT_INTERRUPTED


class StopRequest:
    """Hold whether a signal has asked this rank to save and leave; handlers only set this flag.

    Note: a SIGTERM that comes alone. ``srun --kill-on-bad-exit`` sends it when a rank has died; SIGKILL follows half a
    minute later (KillWait). The others wait in MPI for the dead one, where Python runs no handler, and nothing tells
    this from the SIGTERM of ``scancel``, after which there is time to save. So our job scripts pass on every end of the
    job as SIGUSR1, say so (``HPCTRAIN_ASKED_BY``), and a SIGTERM without it means that a rank is gone. The watchdog
    reads the signals from a pipe, which they reach wherever the main thread is.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.starting = False  # while there is nothing to save: SIGTERM ends the job at once
        self._raised: type[KeyboardInterrupt] | None = None
        self._pipe: int | None = None
        self._terminated: float | None = None
        self._asked = False

    @property
    def name(self) -> str | None:
        """Return the signal's name, None where none has come."""
        return signal.Signals(self.signal).name if self.signal else None

    def alone(self) -> float:
        """Return for how many seconds SIGTERM has been there without SIGUSR1; 0.0 where it has not come, or may."""
        if self._pipe is None:
            return 0.0
        for number in self._arrived(self._pipe):
            self._asked |= number == signal.SIGUSR1
            if number == signal.SIGTERM and self._terminated is None:
                self._terminated = time.monotonic()
        return 0.0 if self._asked or self._terminated is None else time.monotonic() - self._terminated

    def listen(self) -> None:
        """Note signals in a pipe as they come, unless somebody else does."""
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
        """Raise ``KeyboardInterrupt`` if one was raised before and got lost.

        Python drops exceptions in callbacks of weak references and in ``__del__``, which run while modules are imported
        and models built: this rank would train on, though it was told to end.
        """
        if self._raised is not None:
            raise self._raised


stop_request = StopRequest()


def install() -> StopRequest:
    """Catch the signals from now on; a process whose main thread runs elsewhere keeps its own handlers.

    SIGINT raises ``KeyboardInterrupt`` as ever, and is noted.
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
    """Let SIGTERM end the job at once: nothing that is computed here could be saved."""
    before, stop_request.starting = stop_request.starting, True
    try:
        yield
        stop_request.raise_lost_interrupt()
    finally:
        stop_request.starting = before


def _ignore() -> None:
    """Ignore the signals in the last part of this process, in which Python would let them kill.

    srun and others end all ranks as soon as one has left with a code that is not 0. A rank that is just leaving with
    the same code (2: bad input, 75: saved) must not die of that: the job's exit code would be that of a signal.
    """
    for number in SIGNALS:
        if signal.getsignal(number) == stop_request._on_signal:
            signal.signal(number, signal.SIG_IGN)
