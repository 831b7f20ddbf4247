"""Stop and save requests to a run: signals, the job's deadline (walltime guard), and files in the run folder."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hpctrain.cluster import deadline as deadlines
from hpctrain.cluster.deadline import Deadline
from hpctrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from hpctrain.log import logger
from hpctrain.util.retry import TRANSIENT, retries

RESERVE = 60.0  # seconds for costs that are not measured: shutdown, an unusually slow filesystem


class WalltimeGuard:
    """Deadline of the job, and the slowest step and the slowest save of a run so far.

    ``margin`` is the number of seconds before the deadline at which the run stops. 0 means twice
    the slowest save, plus the slowest step, plus one minute. ``clock`` returns seconds since the
    epoch. Only one rank uses this object, because clocks differ.
    """

    def __init__(self, deadline: Deadline | None, margin: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self.deadline = deadline
        self._margin, self._clock = margin, clock
        self._slowest_step = self._slowest_save = 0.0

    def step(self, seconds: float) -> None:
        self._slowest_step = max(self._slowest_step, seconds)

    def save(self, seconds: float) -> None:
        self._slowest_save = max(self._slowest_save, seconds)

    @property
    def margin(self) -> float:
        """Return the seconds before the deadline at which the run must stop."""
        return self._margin or 2 * self._slowest_save + self._slowest_step + RESERVE

    @property
    def is_due(self) -> bool:
        """Return whether the run must save and exit now."""
        return self.deadline is not None and self.deadline.time - self._clock() <= self.margin


# Signal handlers that set a stop request, on which the ranks agree at the end of a step. Standard library only --------
#
# They are installed before torch is imported: before that, a signal's default action kills the rank.


# The batch system's early warning (``--signal=USR1@300``), and its final one.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
ASKED_BY = "HPCTRAIN_ASKED_BY"  # USR1: the job script passes every end of the job to the ranks as SIGUSR1, too

INTERRUPTED = "interrupted"  # by SIGINT, also in records of a run's end


class Terminated(KeyboardInterrupt):
    """SIGTERM before a run has begun: no state can be saved yet, and the start may take minutes."""


def interrupt_message(kind: type[BaseException]) -> tuple[str, int]:
    """Return the message for a ``KeyboardInterrupt`` that ends a rank, and the exit code."""
    if issubclass(kind, Terminated):
        return "terminated before the run has begun, nothing to save", EXIT_TERMINATED
    return INTERRUPTED, EXIT_INTERRUPTED


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
        self._has_sigusr1 = False

    @property
    def name(self) -> str | None:
        """Return the signal's name, None if no signal has arrived."""
        return signal.Signals(self.signal).name if self.signal else None

    def since_lone_sigterm(self) -> float:
        """Return the seconds since SIGTERM arrived without SIGUSR1; 0.0 if none arrived or SIGUSR1 is not passed on."""
        if self._pipe is None:
            return 0.0
        try:
            arrived = os.read(self._pipe, 4096)
        except BlockingIOError:
            arrived = b""
        for number in arrived:
            self._has_sigusr1 |= number == signal.SIGUSR1
            if number == signal.SIGTERM and self._terminated is None:
                self._terminated = time.monotonic()
        return 0.0 if self._has_sigusr1 or self._terminated is None else time.monotonic() - self._terminated

    def listen(self) -> None:
        """Write arriving signals to a pipe, unless the program already uses a wakeup descriptor."""
        if self._pipe is not None:
            return
        self._pipe, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

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


# Requests known to a rank ---------------------------------------------------------------------------------------------
#
# A signal may reach a single rank. The deadline is checked by rank 0 alone, because clocks differ.
# The files are also checked by rank 0, so that not every rank of a large job queries the filesystem.
# At the end of each step, the ranks exchange their requests (``exchange``) and act together.

STOP, SAVE = "STOP", "SAVE"
_PAUSE = 1.0  # seconds between two checks of the folder


class StopSaveFlags:
    """Requests known to this rank; ``first`` marks the rank that checks the clock and the folder."""

    def __init__(self, folder: Path, request: StopRequest, *, first: bool, walltime: str = "", margin: float = 0.0):
        self._folder, self._request, self._first = folder, request, first
        self._walltime, self._margin = walltime, margin
        self._started = time.time()
        self._polled_at = -_PAUSE
        self._found = {STOP: False, SAVE: False}
        self.walltime_guard = WalltimeGuard(None)

    def open(self, saves: Sequence[float], begun: float | None = None) -> None:
        """Read the deadline, and set the durations ``saves`` of saves in earlier attempts.

        A STOP file from before this start is ignored; ``begun`` is the time of the start in seconds
        since the epoch.
        """
        if not self._first:
            return
        found = deadlines.find(os.environ, self._walltime, started=self._started)
        self.walltime_guard = WalltimeGuard(found, self._margin)
        for seconds in saves:
            self.walltime_guard.save(seconds)
        with suppress(FileNotFoundError):  # a STOP file created while this job was starting is meant for this job
            if retries.call(os.stat, self._folder / STOP).st_mtime < (self._started if begun is None else begun):
                retries.call(os.unlink, self._folder / STOP)
        if found is not None:
            logger.info("the job ends at %s, according to %s", _clock(found), found.source)

    def take_over(self) -> None:
        """Check the clock and the folder from now on, because the rank that has done so has died."""
        if not self._first:
            self._first = True
            self.open([])

    def poll(self) -> tuple[bool, bool]:
        """Return whether this rank knows of a reason to save and exit, and of one to save."""
        if self._first and time.monotonic() - self._polled_at >= _PAUSE:
            self._polled_at = time.monotonic()
            self._found = {name: self._is_there(self._folder / name) for name in (STOP, SAVE)}
        stop = self._request.signal is not None or self._found[STOP] or self.walltime_guard.is_due
        return stop, self._found[SAVE]

    @staticmethod
    def _is_there(path: Path) -> bool:
        """Return whether a file exists; False if the filesystem returns an error."""
        try:
            retries.call(os.stat, path)
        except OSError as error:
            if error.errno in TRANSIENT:
                logger.warning("cannot look for %s: %s", path, error.strerror)
            return False
        return True

    @property
    def reason(self) -> str:
        """Reason why the run stops, as far as this rank knows."""
        if self._request.name:
            return self._request.name
        if self._found[STOP]:
            return f"the file {self._folder / STOP}"
        walltime_guard = self.walltime_guard
        if walltime_guard.deadline is not None and walltime_guard.is_due:
            ends = _clock(walltime_guard.deadline)
            return f"the job ends at {ends}, and saving and exiting may take {walltime_guard.margin:.0f} s"
        return "a signal to another rank"

    def saved(self) -> None:
        """Remove the save request that a checkpoint has fulfilled."""
        if self._first and self._found[SAVE]:
            self._found[SAVE] = False
            with suppress(FileNotFoundError):
                retries.call(os.unlink, self._folder / SAVE)


def warn_if_unwatched(folder: Path, watched: str | None) -> None:
    """Warn if the job script watches another folder than the run's for STOP files and new checkpoints."""
    if watched and Path(watched).resolve() != folder.resolve():
        logger.warning(
            "the job's script watches %s and this run writes into %s: use the same folder in hpctrain job "
            "--folder and job.run(checkpoints=...), or the script detects no progress of this run",
            watched,
            folder,
        )


def _clock(deadline: Deadline) -> str:
    return time.strftime("%H:%M:%S", time.localtime(deadline.time))
