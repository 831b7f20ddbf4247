"""Operations of a group: handles (``Work``), and the order in which a group carries them out.

A synchronous operation runs in the thread of its caller. An asynchronous one is queued; a thread of
the group, started with the first of them, carries them out in the order of the calls. A
collective that a callback of a future starts runs at once, in the thread of that callback: in the
queue it would wait for the operation whose callback it is. A large collective that all ranks have
called may run at once, too (``called``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.comm.transport.base import Work as Handle
from hpctrain.errors import DeadlineError

NO_TIMEOUT = timedelta(milliseconds=-1)  # torch's mark of "the timeout of the group"

_future_lock = threading.Lock()  # held while a future is created or completed, never in callbacks


class GroupWork(dist.Work):
    """Operation of a group that has completed; ``tensors`` are those that it has filled.

    The future exists once somebody asks for it: most callers only wait.
    """

    def __init__(self, tensors: Sequence[Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._source = source
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed."""
        return True

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation."""
        return None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation has completed; raise its error."""
        return True

    def synchronize(self) -> None:
        """Wait until the operation has completed."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors."""
        self.wait()
        if self._future is None:
            self._future = _future(self._tensors)
            self._future.set_result(list(self._tensors))
        return self._future

    def result(self) -> list[Tensor]:
        """Return the tensors of the completed operation."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the rank from which a message of any rank came."""
        return self._source

    _source_rank = source_rank


class QueuedWork(GroupWork):
    """Operation that the thread of a group carries out."""

    def __init__(self, what: str, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        self._what = what
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.settled = threading.Event()  # set once the callbacks have run, too: they may start collectives
        self._trigger: torch.futures.Future[Any] | None = None  # completed by ``end``, if somebody asked for a future

    def end(self, error: BaseException | None = None) -> None:
        """Mark the operation as completed or failed, and call the callbacks of its future."""
        with _future_lock:
            self._error = error
            self._ended.set()
            trigger = self._trigger
        try:
            if trigger is not None:
                trigger.set_result(list(self._tensors))
        finally:
            self.settled.set()

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Return the error of the operation."""
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation has completed; raise its error."""
        seconds = timeout.total_seconds()
        if not self._ended.wait(None if seconds <= 0 else seconds):
            raise DeadlineError(f"{self._what} has not completed within the {seconds:g} s of this call of wait")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, or of the error: also C++ code that waits for it raises that."""
        trigger = None
        with _future_lock:
            if self._future is None:
                trigger = _future(self._tensors)
                self._future = trigger.then(self._value)  # an error can be set by a callback only
                if not self._ended.is_set():
                    self._trigger, trigger = trigger, None
        if trigger is not None:
            trigger.set_result(list(self._tensors))
        assert self._future is not None, "created above"
        return self._future

    def _value(self, trigger: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return trigger.value()


class MessageWork(GroupWork):
    """Message in progress; it progresses when a thread of this rank tests it, or calls MPI for another reason.

    ``wait`` waits for a handle within the timeout of the group, or a shorter one, and raises what that means.
    """

    def __init__(
        self,
        handle: Handle,
        wait: Callable[[Callable[[], bool], float], None],
        tensors: Sequence[Tensor] = (),
        source: Callable[[], int] = lambda: -1,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(tensors)
        self._handle = handle
        self._wait = wait
        self._sender = source
        self._after = after
        self._lock = threading.Lock()
        self._completed = False
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Return whether the message is known to have been sent or received, or to have failed."""
        return self._completed or self._error is not None

    def is_completed(self) -> bool:
        """Return whether the message has been sent or received; raise if it has failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._completed and self._done():
                if self._after is not None:
                    self._after()
                self._source = self._sender()
                self._completed = True
        return self._completed

    def _done(self) -> bool:
        try:
            return self._handle.done()
        except Exception as error:
            self._error = error
            raise

    def exception(self) -> BaseException | None:
        """Return the error of the message."""
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the message has been sent or received."""
        if not self._completed:
            self._wait(self.is_completed, timeout.total_seconds())
        return True


class CombinedWork(GroupWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__([tensor for work in works for tensor in work._tensors])
        self._works = works

    def is_completed(self) -> bool:
        """Return whether all have completed."""
        return all([work.is_completed() for work in self._works])

    def exception(self) -> BaseException | None:
        """Return the first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all."""
        for work in self._works:
            work.wait(timeout)
        return True


class Engine:
    """Order of a group's collectives: at once in the caller's thread, or queued for the thread of the group."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], QueuedWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        self._last: QueuedWork | None = None  # last operation that was queued
        self._lock = threading.RLock()  # held while an operation is carried out: two threads may call one group
        self._submission = threading.Lock()

    @property
    def inside(self) -> bool:
        """Return whether the caller is the thread of the group: a callback of an operation."""
        return self._thread_id == get_ident()

    def run(
        self,
        what: str,
        operation: Callable[[], None],
        tensors: Sequence[Tensor],
        *,
        async_op: bool,
        called_by_all: Callable[[bool], bool] | None = None,
    ) -> GroupWork:
        """Carry out an operation after all earlier ones; with ``async_op`` it may be incomplete on return.

        ``called_by_all`` tells whether the operation would not wait for other ranks. Its argument
        permits it to wait a moment.
        """
        inside = self.inside
        if async_op and not inside:
            work = QueuedWork(what, tensors)
            idle = self._last is None or self._last.settled.is_set()
            if called_by_all is not None and called_by_all(idle):
                return self._run_at_once(operation, work)
            return self._submit(operation, work)
        if not inside:
            self.drain()
        with self._lock:
            operation()
        return GroupWork(tensors)

    def _run_at_once(self, operation: Callable[[], None], work: QueuedWork) -> GroupWork:
        self.drain()
        try:
            with self._lock:
                operation()
        except BaseException as error:
            work.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            work.end()
        return work

    def _submit(self, operation: Callable[[], None], work: QueuedWork) -> GroupWork:
        with self._submission:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="hpctrain process group", daemon=True)
                self._thread.start()
            self._last = work
            self._queue.put((operation, work))
        return work

    def _loop(self) -> None:
        self._thread_id = get_ident()
        while (item := self._queue.get()) is not None:
            operation, work = item
            try:
                with self._lock:
                    operation()
            except BaseException as error:
                work.end(error)
            else:
                work.end()
            del operation, work, item  # do not keep tensors alive while the thread waits for the next operation

    def drain(self) -> None:
        """Wait until all queued operations and their callbacks have ended; errors belong to their handles.

        Otherwise an operation of the caller would come before those of a callback on some ranks only.
        """
        last = self._last
        if last is not None:
            last.settled.wait()
            if self._last is last:
                self._last = None

    def close(self) -> None:
        """Complete the queued operations and end the thread."""
        if self._thread is not None and self._thread_id != get_ident():
            self._queue.put(None)
            self._thread.join()
            self._thread, self._thread_id = None, 0


def _future(tensors: Sequence[Tensor]) -> torch.futures.Future[Any]:
    """Return a new future that can hold the tensors: one of tensors on a GPU records events of its streams."""
    devices: list[Any] = list({tensor.device for tensor in tensors if tensor.is_cuda})
    return torch.futures.Future(devices=devices) if devices else torch.futures.Future()
