"""Leave a job: with the exit code that all ranks have agreed on, MPI finalized, and the last words heard."""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import sys
import termios
import time
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.cluster.launcher import end_ranks, is_launched
from hpctrain.errors import EXIT_FAILURE, EXIT_USAGE, FileSystemError, HpctrainError
from hpctrain.train.signals import stop_request, told_and_code
from hpctrain.util.text import printable_lines

PASS_ON = 0.2  # seconds
_PACKAGE = Path(__file__).resolve().parents[1]
SILENCE = 1.0  # seconds that the other ranks leave to rank 0
SILENCE_OF_SRUN = 5.0  # it ends the others, if it was told to (--kill-on-bad-exit), more slowly than other launchers


class LeavingTogether(SystemExit):
    """End the process with an exit code, as every rank does just now: what takes all of them can be given back."""


def exit_code(error: BaseException) -> int:
    """Return the code with which a job ends that ended by this error."""
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE


def told(error: BaseException) -> str:
    """Return a mistake of the program's as the lines of the program that led to it; empty for other errors.

    The frames of this package say nothing of it, nor do any of a file system that fails.
    """
    if isinstance(error, FileSystemError):
        return f"hpctrain: error: {error}\n"
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
    """Print an error that every process has, or may have: rank 0 at once, the others if that one has not got it.

    Before MPI_Init ranks cannot ask each other. Rank 0 ends all ranks once it has printed its error; so a rank that is
    still there after a second, and was not told to end, is one of a few that have it, or its launcher ends no others.
    """
    stop_request.starting = False  # this rank leaves: a SIGTERM of the launcher is noted, and raises nothing
    if not rank:
        said = printable_lines(f"hpctrain: error: {error}")
        print(said, file=sys.stderr, flush=True)
        return
    deadline = time.monotonic() + (SILENCE_OF_SRUN if "SLURM_STEP_ID" in os.environ else SILENCE)
    while time.monotonic() < deadline and stop_request.signal is None:
        time.sleep(0.05)
    if not _has_started() and stop_request.signal is None:
        said = printable_lines(f"hpctrain: error: rank {rank} on {socket.gethostname()}: {error}")
        print(said, file=sys.stderr, flush=True)


def end_unstarted(code: int) -> None:
    """End the other ranks of a job, too, if this process leaves with an error before its MPI is initialized."""
    if not _has_started() and is_launched():
        let_be_read()
        end_ranks(code)


def _has_started() -> bool:
    """Return whether MPI has been initialized, even if it is finalized by now."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def _mpi() -> Any:
    """Return mpi4py's module if MPI is initialized and not finalized, else None; it is never imported here."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


def in_world() -> bool:
    """Return whether this process is one of several ranks of MPI."""
    module = _mpi()
    return module is not None and module.COMM_WORLD.Get_size() > 1


def end_job(code: int) -> None:
    """End all ranks of the job from one that failed on its way into it."""
    sys.stdout.flush()
    let_be_read()
    if module := _mpi():
        module.COMM_WORLD.Abort(code)
    end_ranks(code)
    # Interrupted within the import that initializes MPI, no module is left to finalize it by. A process that leaves
    # without MPI_Finalize is taken as failed by every launcher.
    os._exit(code)


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
    if module := _mpi():
        module.Finalize()


def end_if_uncaught(error: BaseException, rank: int | None, *, launched: bool = True) -> None:
    """End the whole job if nobody catches an error that this rank met on its way into it.

    Without that, Python would finalize MPI, which waits for the other ranks, which wait for this one in a collective.
    An error that every process has is printed by rank 0: the processes cannot talk yet, but their launcher has numbered
    them. A process that no launcher has started (``launched``) leaves as any other program does.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        stop_request.starting = False
        if isinstance(error, HpctrainError) and not in_world():
            say_once(error, rank)
            leave_with(error.exit_code, lambda: None)
            end_unstarted(error.exit_code)
            return
        if not in_world() and not launched:
            before(kind, raised, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        if not interrupted:
            before(kind, raised, trace)
        why, code = told_and_code(kind) if interrupted else (f"{kind.__name__}: {error}", EXIT_FAILURE)
        where = f"rank {rank or 0} on {socket.gethostname()}"
        said = printable_lines(f"hpctrain: {where} ends the job before it has started: {why}")
        print(said, file=sys.stderr, flush=True)
        end_job(code)

    sys.excepthook = hook
