"""Exit of a job: agreed exit code, MPI finalized, and error messages delivered to the launcher."""

from __future__ import annotations

import atexit
import fcntl
import importlib
import os
import socket
import sys
import termios
import time
import traceback
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.cluster.launcher import end_ranks, is_launched
from hpctrain.errors import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CheckpointFaultError,
    FileSystemError,
    HpctrainError,
    LostReplicasError,
)
from hpctrain.train.control import ASKED_BY, interrupt_message, stop_request
from hpctrain.util.text import printable_lines

FORWARD_TIME = 0.2  # seconds in which the launcher may pass on the output
_PACKAGE = Path(__file__).resolve().parents[1]
REPORT_WAIT = 5.0  # seconds that the other ranks wait for rank 0 to report, and for the launcher to end them
REPORT_WAIT_JOB = 30.0  # job scripts always tell srun to end them: only a rank whose error is its own waits so long


class LeavingTogether(SystemExit):
    """Exit of all ranks at the same time with one exit code, so that collective resources can be released."""

    def __init__(self, code: int) -> None:
        super().__init__(code)


def user_traceback(error: BaseException) -> str:
    """Return an error of the program as a traceback of the program's own frames; empty for other errors.

    Frames of this package do not help to locate such an error. A fault of the file system and the loss
    of all replicas are printed without frames.
    """
    if isinstance(error, (FileSystemError, CheckpointFaultError, LostReplicasError)):
        return f"hpctrain: error: {error}\n"
    if not isinstance(error, HpctrainError) or error.exit_code != EXIT_USAGE:
        return ""
    text = traceback.TracebackException.from_exception(error)
    own = [frame for frame in text.stack if not _is_of_package(frame)]
    text.stack = traceback.StackSummary.from_list(own)
    return "".join(text.format(chain=False))


def _is_of_package(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is in a module of this package, or in the constructor of one of its dataclasses."""
    return Path(frame.filename).is_relative_to(_PACKAGE) or (frame.filename, frame.name) == ("<string>", "__init__")


def leave_with(code: int, before_exit: Callable[[], object]) -> None:
    """Exit with ``code`` when this process ends by an exception; Python's own exit code would be 1."""

    def leave() -> None:
        before_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        finalize()
        os._exit(code)

    if code != EXIT_FAILURE:
        atexit.register(leave)


def print_once(error: object, rank: int | None) -> None:
    """Print an error that may occur on every process: rank 0 at once, others only if rank 0 does not have it.

    Before MPI_Init, ranks cannot communicate. Rank 0 ends all ranks after it has printed its error.
    If a rank is still running after some seconds and was not told to end, either only a few ranks
    have the error or the launcher does not end the others.
    """
    stop_request.starting = False  # this rank is exiting: record a SIGTERM of the launcher, and do not raise
    if not rank:
        reason = printable_lines(f"hpctrain: error: {error}")
        print(reason, file=sys.stderr, flush=True)
        return
    deadline = time.monotonic() + report_wait(os.environ)
    while time.monotonic() < deadline and stop_request.signal is None:
        time.sleep(0.05)
    if not _has_started() and stop_request.signal is None:
        reason = printable_lines(f"hpctrain: error: rank {rank} on {socket.gethostname()}: {error}")
        print(reason, file=sys.stderr, flush=True)


def report_wait(environ: Mapping[str, str]) -> float:
    """Return the number of seconds in which rank 0 prints its error and the launcher ends the others."""
    in_script = "SLURM_STEP_ID" in environ and environ.get(ASKED_BY) == "USR1"
    return REPORT_WAIT_JOB if in_script else REPORT_WAIT


def end_unstarted(code: int) -> None:
    """End the other ranks of the job, too, if this process exits with an error before MPI is initialized."""
    if not _has_started() and is_launched():
        wait_until_read()
        end_ranks(code)


def _has_started() -> bool:
    """Return whether MPI has been initialized, even if it is finalized by now."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def _mpi() -> Any:
    """Return mpi4py's module if MPI is initialized and not finalized, otherwise None; never imports it."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


def in_world() -> bool:
    """Return whether this process is one of several MPI ranks."""
    module = _mpi()
    return module is not None and module.COMM_WORLD.Get_size() > 1


def end_job(code: int) -> None:
    """End all ranks of the job from a rank that failed while joining it."""
    sys.stdout.flush()
    wait_until_read()
    if _mpi():
        failures: Any = importlib.import_module("hpctrain.comm.transport.failures")  # imports MPI
        failures.abort(code)
    end_ranks(code)
    # After an interrupt within the import that initializes MPI, there is no module to finalize MPI
    # with. Every launcher treats a process that exits without MPI_Finalize as failed.
    os._exit(code)


def wait_until_read(descriptor: int = 2, seconds: float = 1.0) -> None:
    """Wait until the launcher has read the output, plus a moment in which it can pass the output on.

    A launcher that aborts kills its helpers. Output that they have not passed on by then is lost.
    """
    deadline = time.monotonic() + seconds
    while _unread(descriptor) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(FORWARD_TIME)


def _unread(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe; 0 if the descriptor is not a pipe."""
    count = array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return count[0]


_BEFORE_FINALIZE: list[Callable[[], None]] = []


def before_finalize(call: Callable[[], None]) -> None:
    """Register a function that ends the use of MPI by another thread."""
    _BEFORE_FINALIZE.append(call)


def finalize() -> None:
    """Finalize MPI if it is active: some launchers report a rank that skips this as crashed."""
    if module := _mpi():
        for call in _BEFORE_FINALIZE:
            call()
        module.Finalize()


def end_if_uncaught(error: BaseException, rank: int | None, *, launched: bool = True) -> None:
    """End the whole job if an error that this rank met while joining the job is not caught.

    Otherwise Python would finalize MPI, which waits for the other ranks, which wait for this one in
    a collective. If every process has the error, rank 0 prints it: the processes may not communicate
    yet, but their launcher has numbered them. A process without a launcher (``launched``) exits as
    any other program does.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        stop_request.starting = False
        if isinstance(error, HpctrainError) and (error.everywhere or not in_world()):
            print_once(error, rank)
            leave_with(error.exit_code, lambda: None)
            end_unstarted(error.exit_code)
            return
        if not in_world() and not launched:
            before(kind, raised, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        if not interrupted:
            before(kind, raised, trace)
        why, code = interrupt_message(kind) if interrupted else (f"{kind.__name__}: {error}", EXIT_FAILURE)
        where = f"rank {rank or 0} on {socket.gethostname()}"
        reason = printable_lines(f"hpctrain: {where} ends the job before it has started: {why}")
        print(reason, file=sys.stderr, flush=True)
        end_job(code)

    sys.excepthook = hook
