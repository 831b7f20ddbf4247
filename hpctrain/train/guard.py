"""End the whole job when one rank fails: an exception, an early exit, a thread that dies, a wait without end.

Note: why a rank that raises must abort. Left alone it would wait in ``MPI_Finalize`` for the others, who wait for it in a
collective: no launcher ends that. So uncaught exceptions print once and call ``MPI_Abort``. A rank that leaves early
without an error (``sys.exit(0)``) may be right to do so, if the others need nothing more of it; only who waits for it knows.
So a leaving rank tells the others, and a watchdog thread aborts a rank that has been waiting since. The same thread
enforces ``HPCTRAIN_TIMEOUT`` on waits inside the MPI library. It sleeps; it does not poll MPI while nothing waits.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpctrain.errors import EXIT_FAILURE, HpctrainError
from hpctrain.log import logger
from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.base import Transport

if TYPE_CHECKING:
    from hpctrain.transport.farewell import Farewell

LOOK_EVERY = 0.5  # seconds between two looks of the watchdog
PATIENCE = 2.0  # seconds of waiting after which a rank asks whether somebody has left
CLAIM = 0.2  # seconds in which a rank that failed first may say so


class Guard:
    """Watch one rank of a job until ``close``; one per process. A rank that is alone needs no watching."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._farewell = _farewell(transport)
        self._closed = threading.Event()
        self.step: int | None = None
        self._hooks = (sys.excepthook, threading.excepthook)
        if transport.size > 1:
            sys.excepthook = self._on_exception
            threading.excepthook = self._on_thread_exception
            atexit.register(self._on_exit)
            threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True).start()
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=True)

    def close(self) -> None:
        """Stop watching and give the hooks back."""
        self._closed.set()
        sys.excepthook, threading.excepthook = self._hooks
        atexit.unregister(self._on_exit)

    # A rank that raises -------------------------------------------------------------------------------------------------

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HpctrainError) and error.everywhere:
            if self._transport.rank == 0:
                self._hooks[0](kind, error, trace)
            self._leave_together(error.exit_code)
            return
        if issubclass(kind, KeyboardInterrupt):
            self._end("interrupted", "", 130)
        text = "".join(traceback.format_exception(kind, error, trace))
        self._end(f"{kind.__name__}: {error}", text, exit_code(error))

    def _on_thread_exception(self, args: Any) -> None:
        if args.exc_type is SystemExit:
            return
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        name = args.thread.name if args.thread else "unknown"
        self._end(f"thread {name} died of {args.exc_type.__name__}: {args.exc_value}", text, EXIT_FAILURE)

    def _end(self, why: str, text: str, code: int) -> None:
        """Say once why the job ends, and end it."""
        if self._farewell is None or self._farewell.claim(CLAIM):
            at = "" if self.step is None else f" in step {self.step}"
            where = f"rank {self._transport.rank} of {self._transport.size} on {socket.gethostname()}{at}"
            print(f"{text}hpctrain: {where} ends the job: {why}", file=sys.stderr, flush=True)
        else:
            time.sleep(PATIENCE)  # the rank that failed first has the word, and will end this one too
        self._transport.abort(code)

    def _leave_together(self, code: int) -> None:
        """Leave with the exit code that all ranks have agreed on; Python's own after an exception is always 1."""

        def leave() -> None:
            self._on_exit()
            sys.stdout.flush()
            sys.stderr.flush()
            finalize()
            os._exit(code)

        if code != EXIT_FAILURE:
            atexit.register(leave)

    # A rank that leaves early -------------------------------------------------------------------------------------------

    def _on_exit(self) -> None:
        """Wait until all ranks leave; tell those that may wait for this one."""
        if self._farewell is not None:
            self._farewell.leave()
        self._closed.set()

    # A rank that waits --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        limit = timeout_seconds()
        while not self._closed.wait(LOOK_EVERY):
            seconds, operation, number = waiting.seconds, waiting.operation, waiting.entered
            if seconds < PATIENCE:
                continue
            left = self._farewell.who_left() if self._farewell is not None else []
            if waiting.entered != number or not waiting.operation:
                continue
            if left:
                ranks = ", ".join(map(str, left))
                self._end_waiting(f"rank {ranks} has left, this one waits for it in {operation}")
            elif seconds > limit:
                self._end_waiting(f"{operation} has not ended within {limit:g} s (HPCTRAIN_TIMEOUT)")

    def _end_waiting(self, why: str) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self._end(why, "", EXIT_FAILURE)


def _farewell(transport: Transport) -> Farewell | None:
    """Return what ranks take leave by, where MPI lets a second thread read it."""
    if transport.size == 1:
        return None
    from mpi4py import MPI

    from hpctrain.transport.farewell import Farewell
    from hpctrain.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport), "several ranks are ranks of MPI"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        logger.warning("MPI runs without THREAD_MULTIPLE: a rank that leaves early is noticed at the deadline only")
        return None
    return Farewell(transport)


def exit_code(error: BaseException) -> int:
    """Return the code with which a job ends that ended by this error."""
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE


def finalize() -> None:
    """Finalize MPI if it is up: a rank that skips it looks like a crash to some launchers."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
