"""Threads: a worker that runs jobs in the order of their submission, and a pool for slices of memory.

Note: how a thread ends. It is a daemon, so that it never keeps a process alive. But a thread that
executes torch code while the interpreter shuts down crashes the process. Therefore the end of the
program, and the garbage collection of the worker, first waits for the job in progress and drops the
others. A child created by ``fork`` has no threads: its first job starts a new one.

``ThreadPoolExecutor`` gives none of this: its threads are no daemons, and the interpreter joins
them without a limit, after all jobs in their queue. A copy that never arrives from a device would
keep the process forever. A forked child would wait for a thread that it does not have. Therefore
only the handle is that of ``concurrent.futures``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.errors import DeadlineError, UsageError

T = TypeVar("T")
EXIT_TIMEOUT = 10.0  # seconds to wait for the job in progress when the program ends


class JobHandle(Future[T]):
    """Handle of a submitted job: a future that is valid in the process that submitted the job."""

    def __init__(self, thread: str) -> None:
        super().__init__()
        self._thread, self._process = thread, os.getpid()

    def wait(self) -> T:
        """Return the result of the job, or raise its error; ``DeadlineError`` after a timeout."""
        if not self.done() and os.getpid() != self._process:
            raise UsageError(f"a job of the thread {self._thread} was under way when this process was forked")
        limit = timeout_seconds()
        try:
            return self.result(limit)
        except TimeoutError:
            if self.done():  # the error of the job itself
                raise
            raise DeadlineError(f"a job of the thread {self._thread}: not done within {limit:g} s (HPCTRAIN_TIMEOUT)")

    def run(self, job: Callable[[], T]) -> None:
        """Run the job, and store its result or error."""
        try:
            self.set_result(job())
        except BaseException as error:  # the waiting thread must get any kind of error
            self.set_exception(error)

    def drop(self) -> None:
        """End the job without running it, with an error."""
        self.set_exception(UsageError(f"the thread {self._thread} was closed before this job began"))


Jobs = SimpleQueue[tuple[JobHandle[Any], Callable[[], Any]] | None]


class WorkerThread:
    """Worker thread, started by its first job. It calls ``prepare`` before all jobs."""

    def __init__(self, name: str = "hpctrain-worker", prepare: Callable[[], object] | None = None) -> None:
        self.name, self._prepare = name, prepare
        self._process: int | None = None
        self._finalizer: weakref.finalize[..., WorkerThread]

    def submit(self, job: Callable[[], T]) -> JobHandle[T]:
        """Submit a job, which runs after all earlier jobs."""
        if self._process != os.getpid():
            self._start()
        handle = JobHandle[T](self.name)
        self._jobs.put((handle, job))
        return handle

    def close(self) -> None:
        """Wait for all jobs, then end the thread; a later job starts another thread."""
        if self._process != os.getpid():
            return
        self._jobs.put(None)
        self._thread.join(timeout_seconds())
        self._finalizer.detach()
        self._process = None

    def _start(self) -> None:
        if self._process is not None:
            self._finalizer.detach()  # of the process that was forked
        self._process, self._jobs = os.getpid(), Jobs()
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._prepare), name=self.name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end_thread, self._jobs, self._thread)


def _work(jobs: Jobs, prepare: Callable[[], object] | None) -> None:
    """Run jobs until None is received. The thread does not reference the worker, which may be garbage-collected."""
    if prepare is not None:
        prepare()
    while (submitted := jobs.get()) is not None:
        handle, job = submitted
        handle.run(job)
        del submitted, handle, job  # so that their objects are freed while this waits


def _end_thread(jobs: Jobs, thread: threading.Thread) -> None:
    """Drop the jobs that have not started, and wait for the job in progress."""
    try:
        while (submitted := jobs.get_nowait()) is not None:
            submitted[0].drop()
    except Empty:
        pass
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_TIMEOUT)


# Thread pool for slices of memory: each thread takes the next slice when it has finished one --------------------------
#
# Note: why torch's own threads are not used. They synchronise after every call, and a slice that fits
# into a cache takes about 50 microseconds per call. If one core is busy with other work, all threads
# wait for it in each call. An update that should take 40 ms has been observed to take 1000. The
# threads of this pool synchronise once, at the end, and each uses one core for its calls.


class SliceThreads:
    """Pool of ``count`` threads, by default as many as torch uses for computations."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or torch.get_num_threads()
        self._workers = [WorkerThread(f"hpctrain-slices-{number}", use_one_thread) for number in range(self.count)]

    def each(self, function: Callable[[T], None], items: Sequence[T]) -> None:
        """Call ``function`` with every item, in no particular order; raise the error of the first failed call."""
        if min(self.count, len(items)) < 2:
            for item in items:
                function(item)
            return
        remaining = deque(items)
        handles = [worker.submit(lambda: _process(remaining, function)) for worker in self._workers[: len(items)]]
        errors = []
        for handle in handles:  # wait for all of them: no thread may write any more after the return
            try:
                handle.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


shared_threads = cache(SliceThreads)  # one pool for all optimizers of this process, because they share the cores


def _process(remaining: deque[T], function: Callable[[T], None]) -> None:
    """Process the remaining items one by one, without gradients; that mode is per thread."""
    torch.set_grad_enabled(False)
    while remaining:
        try:
            item = remaining.popleft()
        except IndexError:
            return  # another thread took it
        try:
            function(item)
        except BaseException:
            remaining.clear()  # the remaining results would be useless
            raise


def use_one_thread() -> None:
    """Make torch use no further threads for calls from this thread.

    ``torch.set_num_threads`` would change the number for future threads and for MKL in the whole
    process. OpenMP's own call affects only the calling thread. Without OpenMP, results stay
    correct, but slices are divided over threads a second time.
    """
    torch.get_num_threads()  # at its first call in a thread torch sets the number, which would undo this
    try:
        ctypes.CDLL(None).omp_set_num_threads(1)
    except AttributeError:
        pass
