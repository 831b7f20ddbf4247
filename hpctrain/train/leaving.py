"""Leave a job: with the exit code that all ranks have agreed on, MPI finalized, and the last words heard."""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import termios
import time
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from hpctrain.errors import EXIT_FAILURE, EXIT_USAGE, HpctrainError
from hpctrain.util.text import printable_lines

PASS_ON = 0.2  # seconds
_PACKAGE = Path(__file__).resolve().parents[1]
SILENCE = 1.0  # seconds that the other ranks leave to rank 0


class LeavingTogether(SystemExit):
    """End the process with an exit code, as every rank does just now: what takes all of them can be given back."""


def exit_code(error: BaseException) -> int:
    """Return the code with which a job ends that ended by this error."""
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE


def told(error: BaseException) -> str:
    """Return a mistake of the program's as the lines of the program that led to it; empty for other errors.

    The frames of this package say nothing of it.
    """
    if not isinstance(error, HpctrainError) or error.exit_code != EXIT_USAGE:
        return ""
    text = traceback.TracebackException.from_exception(error)
    own = [frame for frame in text.stack if not Path(frame.filename).is_relative_to(_PACKAGE)]
    text.stack = traceback.StackSummary.from_list(own)
    return "".join(text.format(chain=False))


def leave_with(code: int, farewell: Callable[[], object]) -> None:
    """Make this process, which is about to end by an exception, end with a code of ours; Python's own is always 1."""

    def leave() -> None:
        farewell()
        sys.stdout.flush()
        sys.stderr.flush()
        finalize()
        os._exit(code)

    if code != EXIT_FAILURE:
        atexit.register(leave)


def say_once(error: object, rank: int | None) -> None:
    """Print an error that every process has, if this is rank 0; otherwise let that one come first.

    A launcher may end all processes as soon as one ends with an error, and rank 0 must have spoken by then.
    """
    if rank:
        time.sleep(SILENCE)
        return
    print(f"hpctrain: error: {printable_lines(str(error))}", file=sys.stderr, flush=True)


def let_be_read(descriptor: int = 2, seconds: float = 1.0) -> None:
    """Wait until the launcher has taken what was printed, and a moment more in which it may pass that on.

    A launcher that is told to abort kills its helpers, and what they had not passed on by then is never seen.
    """
    deadline = time.monotonic() + seconds
    while _unread(descriptor) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(PASS_ON)


def _unread(descriptor: int) -> int:
    """Return the bytes that wait in a pipe; 0 for what is none."""
    count = array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return count[0]


def finalize() -> None:
    """Finalize MPI if it is up: a rank that skips it looks like a crash to some launchers."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()


def let_one_speak(error: HpctrainError, rank: int | None) -> None:
    """Let only rank 0 print an error that every process has, should nobody catch it.

    For errors from before there is a world: the processes cannot talk yet, but their launcher has numbered them.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        say_once(error, rank)
        leave_with(error.exit_code, lambda: None)

    sys.excepthook = hook
