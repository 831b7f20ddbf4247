"""Leave with the exit code that all ranks have agreed on, and with MPI finalized."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from hpctrain.errors import EXIT_FAILURE, HpctrainError


def exit_code(error: BaseException) -> int:
    """Return the code with which a job ends that ended by this error."""
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE


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
        if not rank:
            print(f"hpctrain: error: {error}", file=sys.stderr, flush=True)
        leave_with(error.exit_code, lambda: None)

    sys.excepthook = hook
