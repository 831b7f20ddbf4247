"""Failure detection: ends the job if a rank raises, exits early, loses a thread or waits without end.

A rank that raises must abort. Otherwise it would wait in ``MPI_Finalize`` for the other ranks,
which wait for it in a collective, and no launcher would end the job. Uncaught exceptions are
therefore printed once, followed by ``MPI_Abort``.

A rank that exits early without an error (``sys.exit(0)``) may be correct, if the other ranks need
no more data from it. Only a rank that waits for it can tell. A leaving rank therefore notifies the
others, and a watchdog thread aborts a rank that keeps waiting after that. The same thread enforces
``HPCTRAIN_TIMEOUT`` on waits inside the MPI library. It sleeps, and polls MPI only while its rank
waits.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from hpctrain.comm.agreement import agreed
from hpctrain.comm.transport.base import Transport
from hpctrain.comm.transport.waiting import timeout_seconds, waiting
from hpctrain.errors import EXIT_FAILURE, EXIT_INTERRUPTED, DeadlineError, HpctrainError, LockError, RankFailedError
from hpctrain.log import logger
from hpctrain.train.control import ASKED_BY, interrupt_message, stop_request
from hpctrain.train.exit import leave_with, user_traceback, wait_until_read
from hpctrain.train.receipt.write import FailureRecord
from hpctrain.util.text import printable_lines

if TYPE_CHECKING:
    from hpctrain.comm.transport.failures import FailureDetector
    from hpctrain.comm.transport.liveness import ExitNotifier, Heartbeat


def print_stacks(whose: str) -> None:
    """Write the stacks of all threads to standard error, under a heading that contains ``whose``."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    sys.stderr.flush()
    os.write(2, f"hpctrain: the stacks of {whose}:\n".encode() + text)


LOOK_EVERY = 0.5  # seconds between two checks of the watchdog
POLL_EVERY = 0.05  # the same if it must also detect dead ranks
PATIENCE = 2.0  # seconds of waiting after which a rank checks whether another rank has left
SIGTERM_WAIT = 3.0  # seconds after SIGTERM within which SIGUSR1 would have arrived, too
CLAIM_WAIT = 0.2  # seconds to wait for earlier claims of the failure report by other ranks
REPORT_WAIT = 1.0  # seconds that a rank waits for the report of a dead rank by another rank
MOST = 4  # maximum number of other ranks that an error message lists
UNSAVED = "; steps after the newest checkpoint are lost (a file STOP in the run folder saves first)"
ABORT_WAIT = 5.0  # seconds that a rank waits for the first failed rank to end the job, before it does so itself


class Watchdog:
    """Monitor of one rank of a job until ``close``; one per process. A job of one rank needs no monitoring.

    ``limit`` is the number of seconds after which a wait ends the job, instead of ``HPCTRAIN_TIMEOUT``.
    """

    def __init__(self, transport: Transport, limit: float | None = None) -> None:
        self._transport = transport
        self._exit_notifier: ExitNotifier | None = None
        self._heartbeat: Heartbeat | None = None
        self.detector: FailureDetector | None = None  # if MPI does not end a job whose rank has died
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._stacks_printed = threading.Lock()
        self.step: int | None = None
        self.failure_record: FailureRecord | None = None  # failure record of the current run
        self._hooks = (sys.excepthook, threading.excepthook)
        if transport.size > 1:
            self._exit_notifier, self._heartbeat = _monitors(transport)
            self.detector = _detector(transport) if self._exit_notifier is not None else None
            sys.excepthook = self._on_exception
            threading.excepthook = self._on_thread_exception
            atexit.register(self._on_exit)
            self._limit = agreed(transport, timeout_seconds) if limit is None else limit
            threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True).start()
        else:
            sys.excepthook = self._on_lone_exception
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=True)

    def rejoin(self, transport: Transport) -> None:
        """Monitor the ranks that are left, after others have died. Collective over them."""
        self._transport = transport
        self._exit_notifier, self._heartbeat = _monitors(transport) if transport.size > 1 else (None, None)
        self._prepare_finalize()

    def close(self) -> None:
        """Stop monitoring and restore the exception hooks."""
        self._closed.set()
        sys.excepthook, threading.excepthook = self._hooks
        atexit.unregister(self._on_exit)
        self._prepare_finalize()

    def end(self, why: str, code: int) -> None:
        """End the job with this exit code, because this rank has failed; one rank prints why."""
        self._end(why, "", code)

    # A rank that raises -----------------------------------------------------------------------------------------------

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, HpctrainError) and error.everywhere and not self._has_dead_ranks:
            if self._transport.rank == 0:
                self._print(kind, error, trace)
            leave_with(error.exit_code, self._on_exit)
            return
        if issubclass(kind, KeyboardInterrupt):
            why, code = interrupt_message(kind)
            self._end(why + (UNSAVED if self.step and code == EXIT_INTERRUPTED else ""), "", code)
        if isinstance(error, RankFailedError):
            self._end_without_dead_ranks(within=REPORT_WAIT)
        if isinstance(error, LockError):
            self.failure_record = None  # another start has taken over the folder
        text = user_traceback(error) or "".join(traceback.format_exception(kind, error, trace))
        late = issubclass(kind, DeadlineError)
        others = partial(self._elsewhere, str(error)) if late else str
        code = error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE
        silence = REPORT_WAIT if isinstance(error, RankFailedError) else ABORT_WAIT
        self._end(f"{kind.__name__}: {error}", text, code, stacks=late, silence=silence, others=others)

    def _on_lone_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error as Python does and exit with its code, by which a job script decides whether to retry."""
        self._print(kind, error, trace)
        if isinstance(error, HpctrainError):
            leave_with(error.exit_code, lambda: None)

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if text := user_traceback(error):
            print(printable_lines(text), end="", file=sys.stderr, flush=True)
        else:
            self._hooks[0](kind, error, trace)

    def _on_thread_exception(self, args: Any) -> None:
        if args.exc_type is SystemExit:
            return
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        name = args.thread.name if args.thread else "unknown"
        self._end(f"thread {name} died of {args.exc_type.__name__}: {args.exc_value}", text, EXIT_FAILURE)

    def _end(
        self,
        why: str,
        text: str,
        code: int,
        *,
        stacks: bool = False,
        silence: float = ABORT_WAIT,
        leave: Callable[[int], object] | None = None,
        others: Callable[[], str] = str,
    ) -> None:
        """Print once why the job ends, with the stacks of all ranks of the node if requested, and end it.

        ``others`` describes what other ranks do; by then, those with the same error have claimed the end, too.
        """
        # If another thread of this rank is already ending the job, that thread reports it.
        is_first = self._ending.acquire(blocking=False)
        if is_first and (self._heartbeat is None or self._heartbeat.claim(CLAIM_WAIT)):
            why += others()
            if stacks:
                if self._heartbeat is not None:
                    self._heartbeat.request_stacks()
                self._print_stacks()
                time.sleep(2 * LOOK_EVERY)  # the watchdogs of the other ranks check within this time
            at = "" if self.step is None else f" in step {self.step}"
            where = f"rank {self._transport.rank} of {self._transport.size} on {socket.gethostname()}{at}"
            text = printable_lines(f"{text}hpctrain: {where} ends the job: {why}")
            print(text, file=_stderr(), flush=True)
            if self.failure_record is not None:
                self.failure_record.say(why, self.step)
            if self.detector is not None and self._exit_notifier is not None:
                self._exit_notifier.end_others(code)  # they could continue without this rank
            wait_until_read()
        else:
            time.sleep(silence if is_first else ABORT_WAIT)
        if leave is None and self._is_last:
            leave = os._exit  # no other rank is left
        (leave or self._transport.abort)(code)

    @property
    def _is_last(self) -> bool:
        """Whether all other ranks have died."""
        return self.detector is not None and self.detector.is_last

    # A rank that leaves early -----------------------------------------------------------------------------------------

    def _on_exit(self) -> None:
        """Wait until all ranks leave; notify ranks that may wait for this one."""
        if self._exit_notifier is not None:
            try:
                self._exit_notifier.leave()
                _release_windows(self._transport)
            except RankFailedError:
                if not self._continues:
                    self._end_without_dead_ranks()
        self._closed.set()
        self._prepare_finalize()

    def _prepare_finalize(self) -> None:
        if self.detector is not None:  # a rank may also die in MPI_Finalize
            self.detector.skip_finalize_barrier()

    # A rank that waits ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY if self.detector is None else POLL_EVERY):
            self._look_for_dead_ranks()
            seconds, operation, number = waiting.seconds, waiting.operation, waiting.count
            since_lone_sigterm = stop_request.since_lone_sigterm()
            if self._heartbeat is not None:
                self._heartbeat.beat(operation, seconds)
                if self._heartbeat.stacks_requested():
                    self._print_stacks()
            if seconds < PATIENCE:
                continue
            left = self._exit_notifier.ranks_that_left() if self._exit_notifier is not None else []
            if waiting.count != number or not waiting.operation:
                continue
            if since_lone_sigterm > SIGTERM_WAIT:
                why = f"a rank has died (SIGTERM without SIGUSR1, {ASKED_BY}), this one waits in {operation}"
                # srun is already ending the job; MPI_Abort would wait for it.
                self._end(why, "", EXIT_FAILURE, silence=CLAIM_WAIT, leave=os._exit)
            if left:
                ranks = f"rank {left[0]} has" if len(left) == 1 else f"ranks {', '.join(map(str, left))} have"
                self._end(f"{ranks} left, this one waits in {operation}", "", EXIT_FAILURE, stacks=True)
            elif seconds > self._limit:
                why = f"{operation} has not ended within {self._limit:g} s (HPCTRAIN_TIMEOUT){self._others()}"
                self._end(why, "", EXIT_FAILURE, stacks=True)

    @property
    def _has_dead_ranks(self) -> bool:
        """Whether ranks have died: others may not have an error of all ranks then, or rank 0 may be dead."""
        return self.detector is not None and (self.detector.has_lost or bool(self.detector.dead()))

    @property
    def _continues(self) -> bool:
        """Whether the job continues without dead ranks."""
        return self.detector is not None and self.detector.continues

    def _look_for_dead_ranks(self) -> None:
        """Look for dead ranks, where MPI does not end a job that has some: continue without them, or end the job."""
        if self.detector is None:
            return
        self.end_with_others()
        if self.detector.continues:
            self.detector.interrupt()
        else:
            self._end_without_dead_ranks()

    def end_with_others(self) -> None:
        """End this rank if another one has told that it ends the job, where MPI does not end all ranks."""
        if self.detector is None or self._exit_notifier is None:
            return
        if (ending := self._exit_notifier.rank_that_ends()) is not None:
            self._end(f"rank {ending[0]} has ended it", "", ending[1], silence=REPORT_WAIT)

    def _end_without_dead_ranks(self, within: float = 0.0) -> None:
        """End the job if another rank has died, where MPI does not do so itself; wait ``within`` seconds for that.

        When another rank has detected it, operations of this one end with an error before it detects it itself.
        """
        if self.detector is None:
            return
        deadline = time.monotonic() + within
        while not (dead := self.detector.dead()):
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_EVERY)
        at = f", this one waits in {waiting.operation}" if waiting.operation else ""
        # The launcher does not end the other ranks, so each ends itself.
        self._end(f"{self.detector.describe(dead)}{at}", "", EXIT_FAILURE, silence=REPORT_WAIT)

    def _others(self) -> str:
        """Describe the late ranks, or all ranks if all wait: they may be in different collectives."""
        statuses = self._heartbeat.read_all() if self._heartbeat is not None else []
        return "".join(f"; {status}" for status in ([status for status in statuses if status.late] or statuses))

    def _elsewhere(self, own: str) -> str:
        """Describe what other ranks of the node do, unless this rank's error names the rank or the same operation."""
        statuses = self._heartbeat.read_all() if self._heartbeat is not None else []
        others = [one for one in statuses if not one.ending and f"rank {one.rank} " not in own]
        found = [one for one in others if not one.operation or not own.startswith(one.operation)]
        return "".join(f"; {status}" for status in found[:MOST])

    def _print_stacks(self) -> None:
        if self._stacks_printed.acquire(blocking=False):
            print_stacks(f"rank {self._transport.rank} on {socket.gethostname()}")


def _stderr() -> TextIO:
    """Return the standard error of the process.

    While the exception hook of torch.distributed calls this module's hook, ``sys.stderr`` is a buffer, which would be
    lost with the abort.
    """
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr


def _release_windows(transport: Transport) -> None:
    """Free the MPI windows that ranks still expose to each other. Collective, when all ranks leave.

    MPI libraries warn of windows that exist in MPI_Finalize. Programs are not required to call
    ``job.close``.
    """
    from hpctrain.comm.rma.mpi_memory import release
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport), "several ranks are ranks of MPI"
    release(transport.comm)


def _monitors(transport: Transport) -> tuple[ExitNotifier | None, Heartbeat | None]:
    """Return the exit notifier, None unless MPI allows a second thread to use it, and the heartbeat. Collective."""
    from mpi4py import MPI

    from hpctrain.comm.transport.liveness import ExitNotifier, Heartbeat
    from hpctrain.comm.transport.mpi import MpiTransport
    from hpctrain.comm.transport.reserve import NoSpaceError

    assert isinstance(transport, MpiTransport), "several ranks are ranks of MPI"
    statuses = None
    try:
        statuses = Heartbeat(transport.comm)
    except NoSpaceError as error:
        logger.warning("ranks of this node cannot report what other ranks wait for: %s", error)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        logger.warning("MPI runs without THREAD_MULTIPLE: a rank that leaves early is detected only at the timeout")
        return None, statuses
    return ExitNotifier(transport.comm), statuses


def _detector(transport: Transport) -> FailureDetector | None:
    """Return a detector of dead ranks; None if MPI itself ends a job whose rank has died. Collective."""
    from hpctrain.comm.transport.failures import FailureDetector, reports_failures
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport), "several ranks are ranks of MPI"
    return FailureDetector(transport.comm) if reports_failures() else None
