"""Do work in a thread of its own, in the order in which it is handed in.

Note: how a thread ends. It is a daemon, so that it never keeps a process alive, but one that is inside of torch while
the interpreter goes away brings the process down. So the end of the program, and of the worker, first lets the job
under way come to its end and drops the others. A child made by ``fork`` has no threads: its first job starts one anew.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from hpctrain.errors import DeadlineError, UsageError
from hpctrain.transport.activity import timeout_seconds

T = TypeVar("T")
FAREWELL = 10.0  # seconds that the job under way gets when the program ends


class Ticket(Generic[T]):
    """Stand for a job that was handed in."""

    def __init__(self, job: Callable[[], T], name: str) -> None:
        self._job: Callable[[], T] | None = job
        self._name, self._process = name, os.getpid()
        self._ended = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Tell whether the job has come to its end, well or not."""
        return self._ended.is_set()

    def wait(self) -> T:
        """Return what the job returned, or raise what it raised; ``DeadlineError`` where it takes too long."""
        if not self.done and os.getpid() != self._process:
            raise UsageError(f"a job of the thread {self._name} was under way when this process was forked")
        limit = timeout_seconds()
        if not self._ended.wait(limit):
            raise DeadlineError(f"a job of the thread {self._name}: not done within {limit:g} s (HPCTRAIN_TIMEOUT)")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def run(self) -> None:
        """Do the job, and keep what came of it."""
        assert self._job is not None, "a job is done once"
        try:
            self._results.append(self._job())
        except BaseException as error:  # whoever waits has to know, whatever it is
            self._error = error
        self._end()

    def drop(self) -> None:
        """Leave the job undone."""
        self._error = UsageError(f"the thread {self._name} was closed before it came to this job")
        self._end()

    def _end(self) -> None:
        self._job = None  # with all that it holds
        self._ended.set()


Jobs = SimpleQueue[Ticket[Any] | None]


class Worker:
    """Be a thread that works; there is none before the first job. ``prepare`` is called in it, before everything."""

    def __init__(self, name: str = "hpctrain-worker", prepare: Callable[[], object] | None = None) -> None:
        self.name, self._prepare = name, prepare
        self._process: int | None = None
        self._leave: weakref.finalize[..., Worker]

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Hand a job in, which is done when all before it are."""
        if self._process != os.getpid():
            self._start()
        ticket = Ticket(job, self.name)
        self._jobs.put(ticket)
        return ticket

    def close(self) -> None:
        """Let all jobs come to their end, and the thread too; a later job starts another."""
        if self._process != os.getpid():
            return
        self._jobs.put(None)
        self._thread.join(timeout_seconds())
        self._leave.detach()
        self._process = None

    def _start(self) -> None:
        if self._process is not None:
            self._leave.detach()  # of the process that was forked
        self._process, self._jobs = os.getpid(), Jobs()
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._prepare), name=self.name, daemon=True)
        self._thread.start()
        self._leave = weakref.finalize(self, _leave, self._jobs, self._thread)


def _work(jobs: Jobs, prepare: Callable[[], object] | None) -> None:
    """Be the thread; it knows nothing of the worker, which may be forgotten."""
    if prepare is not None:
        prepare()
    while (ticket := jobs.get()) is not None:
        ticket.run()
        del ticket  # while this waits for the next


def _leave(jobs: Jobs, thread: threading.Thread) -> None:
    """Drop the jobs that have not begun, and wait for the one under way."""
    try:
        while (ticket := jobs.get_nowait()) is not None:
            ticket.drop()
    except Empty:
        pass
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(FAREWELL)
