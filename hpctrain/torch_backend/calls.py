"""Calls of one process group: their order, deadline, comparison between ranks and profiler events.

After a failure in which ranks may have lost step (a timeout, an abort, an error of MPI) the group
is broken: every later call fails at once and names the first failure. Otherwise later calls would
exchange data of different operations.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.debug import MismatchDetector, call_site
from hpctrain.comm.transport.base import TAGS
from hpctrain.comm.transport.waiting import limits, waiting
from hpctrain.errors import CommunicationError, DeadlineError
from hpctrain.torch_backend.called import CalledCollectives
from hpctrain.torch_backend.events import event
from hpctrain.torch_backend.transport import PollingTransport, poll
from hpctrain.torch_backend.work import Engine, GroupWork, MessageWork

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

BARRIER_TAG = TAGS - 2  # of ``monitored_barrier``: collectives, which use it too, are not in progress then
PENDING = 16  # number of messages beyond which completed ones are released


class GroupCalls:
    """Operations of one group, each carried out within a time limit, in the order of the calls."""

    def __init__(self, comm: Communicator, timeout: timedelta, name: str, backend_name: str) -> None:
        assert isinstance(comm.transport, PollingTransport), "only its waits can be ended"
        self.name = name
        self.timeout = timeout
        self._backend_name = backend_name
        self._transport = comm.transport
        self._size = comm.size
        self._engine = Engine()
        self._called = CalledCollectives(comm)
        self._process = os.getpid()
        self._broken = ""  # why later calls fail
        self._kept: list[Any] = []  # memory of unfinished operations: MPI may still write into it
        self._pending: list[MessageWork] = []  # their tensors must exist, even if the caller drops the handles
        self._pending_lock = threading.Lock()
        self._detector = _detector(comm)

    # Collectives ------------------------------------------------------------------------------------------------------

    def collective(
        self,
        what: str,
        operation: Callable[[], object],
        tensors: Sequence[Tensor] = (),
        *,
        seconds: float,
        async_op: bool,
        compared: Sequence[Tensor] = (),
        detail: str = "",
        inputs: Sequence[Tensor] = (),
        large: bool = False,
    ) -> GroupWork:
        """Carry out a collective at once, or queue it; ``tensors`` are its results.

        With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` shapes and dtypes of ``compared`` and ``detail`` must
        be the same on all ranks. ``inputs`` are shown by torch's profiler. ``large`` is the same on all
        ranks; such an operation may run at once although it is asynchronous.
        """
        self.check(what)
        profiled = event(self._backend_name, what, inputs or tensors)
        site = "" if self._detector is None else call_site()
        inference = torch.is_inference_mode_enabled()

        def call() -> None:
            self.check(what)  # an operation that was queued before this one may have failed
            try:
                with limits.within(seconds, what, self._stop):
                    if self._detector is not None:
                        self._detector(what, *compared, detail=detail, site=site)
                    if large and self._called.missing:
                        self._called.create()
                    if inference:  # temporary tensors that are kept for later calls must be ordinary ones
                        with torch.inference_mode(False):
                            operation()
                    else:
                        operation()
            except BaseException as error:
                self._fail(error)
            finally:
                if profiled is not None:
                    profiled.end()

        by_all = None
        if large and self._engine.inside:
            self._called.stop_counting()
        elif large:
            by_all = partial(self._called.by_all, self._called.announce())
        return self._engine.run(what, call, tensors, async_op=async_op, called_by_all=by_all)

    # Messages ---------------------------------------------------------------------------------------------------------

    def message(
        self,
        what: str,
        start: Callable[[], Any],
        tensors: Sequence[Tensor] = (),
        *,
        source: Callable[[Any], int] = lambda handle: -1,
        after: Callable[[], None] | None = None,
    ) -> MessageWork:
        """Start a message; its handle is completed by ``wait``."""
        self.check(what)
        profiled = event(self._backend_name, what, tensors)
        try:
            handle = start()
        except BaseException as error:
            self._fail(error)

        def completed() -> None:
            if after is not None:
                after()
            if profiled is not None:
                profiled.end()

        def wait(ready: Callable[[], bool], seconds: float) -> None:
            self._wait(what, ready, seconds, getattr(handle, "why", None))

        work = MessageWork(handle, wait, tensors, lambda: source(handle), completed)
        with self._pending_lock:
            self._pending = [each for each in self._pending if not each.ended]
            if len(self._pending) >= PENDING:
                self._pending = [each for each in self._pending if _is_pending(each)]
            self._pending.append(work)
        return work

    def _wait(self, what: str, ready: Callable[[], bool], seconds: float, why: Callable[[], str] | None) -> None:
        """Wait for a message: within the group's timeout, or a shorter time, after which it may be waited for again."""
        self.check(what)
        shorter = 0 < seconds < self.timeout.total_seconds()
        try:
            with limits.within(seconds if shorter else self.timeout.total_seconds(), what, self._stop), waiting(what):
                poll(ready) if why is None else poll(ready, why)
            with self._pending_lock:
                self._pending = [each for each in self._pending if not each.ended]
        except BaseException as error:
            if shorter and isinstance(error, DeadlineError) and not self._broken:
                raise
            self._fail(error)

    def monitored_barrier(self, timeout: timedelta | None, *, name_all: bool) -> None:
        """Wait until all ranks have called it; rank 0 names the first rank that has not, or all of them."""
        self.check("monitored_barrier")
        self._engine.drain()
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        try:
            with limits.within(seconds, "monitored_barrier", self._stop):
                if self._transport.rank:
                    self._answer_rank_0()
                else:
                    self._await_ranks(seconds, name_all)
        except BaseException as error:
            self._fail(error)

    # The texts of errors are those of gloo, which programs look for.

    def _answer_rank_0(self) -> None:
        token, rank = torch.zeros(1, dtype=torch.uint8), self._transport.rank
        try:
            self._transport.send(token, 0, BARRIER_TAG)
            self._transport.recv(token, 0, BARRIER_TAG)
        except DeadlineError as error:
            raise DeadlineError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {error}"
            ) from error

    def _await_ranks(self, seconds: float, name_all: bool) -> None:
        if seconds <= 0:
            raise DeadlineError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms")
        token = torch.zeros(1, dtype=torch.uint8)
        waiting = {
            rank: self._transport.irecv(torch.zeros_like(token), rank, BARRIER_TAG) for rank in range(1, self._size)
        }
        try:
            poll(lambda: all([handle.done() for handle in waiting.values()]))
        except DeadlineError as error:
            missing = [rank for rank, handle in waiting.items() if not handle.done()]
            who = f"Ranks {', '.join(map(str, missing))}" if name_all else f"Rank {missing[0]}"
            raise DeadlineError(f"{who} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms") from error
        for rank in waiting:
            self._transport.send(token, rank, BARRIER_TAG)

    # Failures ---------------------------------------------------------------------------------------------------------

    def check(self, what: str) -> None:
        """Raise if this group cannot be used: after a failure, or in a process forked from its own."""
        if self._broken:
            raise CommunicationError(
                f"{what}: process group {self.name} cannot be used any more ({self._broken}); "
                "destroy it, or end this process"
            )
        if os.getpid() != self._process:
            raise CommunicationError(
                f"{what}: process group {self.name} was made by process {self._process}, from which this one was "
                "forked; MPI serves the process that started it only: exchange tensors in the main process, "
                "not in a worker of a DataLoader"
            )

    def break_group(self, reason: str) -> None:
        """Make the operation in progress and all later ones fail."""
        self._broken = self._broken or reason

    def _stop(self) -> str:
        """Return why an operation in progress must end; let MPI advance the messages of this rank meanwhile."""
        if self._pending:
            self._transport.progress()
        return self._broken

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise the error of a call, with the name of the group; break the group if ranks may have lost step."""
        refused = isinstance(error, (ValueError, TypeError)) or type(error) is CommunicationError
        if refused or getattr(error, "everywhere", False):
            raise error
        self._keep(error)
        if isinstance(error, (DeadlineError, MPI.Exception)):
            kind = DeadlineError if isinstance(error, DeadlineError) else CommunicationError
            text = str(error) if self._broken else f"{error} (process group {self.name}, {self._size} ranks)"
            self.break_group(text)
            raise kind(text) from error
        self.break_group(f"{type(error).__name__}: {error}")
        raise error

    def _keep(self, error: BaseException) -> None:
        """Keep the tensors of an unfinished operation: all that its frames refer to."""
        trace = error.__traceback__
        while trace is not None:
            self._kept.append(dict(trace.tb_frame.f_locals))
            trace = trace.tb_next
        self._kept.append(self._pending)

    def close(self, free: Callable[[], None]) -> None:
        """Complete what is queued and free the communicator, if all ranks do so soon and nothing has failed."""
        if os.getpid() != self._process:
            return
        self._engine.close()
        self._called.close()
        if not self._broken:
            self._broken = "it was destroyed"
            self._transport.leave(lambda: self._free(free))

    def _free(self, free: Callable[[], None]) -> None:
        if self._detector is not None:
            self._detector.free()
        free()


def _is_pending(work: MessageWork) -> bool:
    """Return whether a message is in progress; an error belongs to those who wait for it."""
    try:
        return not work.is_completed()
    except CommunicationError:
        return False


def _detector(comm: Communicator) -> MismatchDetector | None:
    """Return the comparison of each call between ranks that TORCH_DISTRIBUTED_DEBUG=DETAIL asks for. Collective."""
    c10d: Any = dist
    wanted = c10d.get_debug_level() == c10d.DebugLevel.DETAIL and comm.size > 1
    return MismatchDetector(comm.transport.split(0, comm.rank)) if wanted else None
