"""Thread pool for slices of memory: each thread takes the next slice when it has finished one.

Note: why torch's own threads are not used. They synchronise after every call, and a slice that fits
into a cache takes about 50 microseconds per call. If one core is busy with other work, all threads
wait for it in each call. An update that should take 40 ms has been observed to take 1000. The
threads of this pool synchronise once, at the end, and each computes its calls alone.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from hpctrain.parallel.offload.worker import Worker

T = TypeVar("T")


class Hands:
    """Pool of ``count`` threads, by default as many as torch uses for computations."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or torch.get_num_threads()
        self._workers = [Worker(f"hpctrain-hand-{number}", compute_alone) for number in range(self.count)]

    def each(self, do: Callable[[T], None], items: Sequence[T]) -> None:
        """Call ``do`` with every item, in no particular order; raise the error of the first failed call."""
        if min(self.count, len(items)) < 2:
            for item in items:
                do(item)
            return
        left = deque(items)
        tickets = [worker.submit(lambda: _take(left, do)) for worker in self._workers[: len(items)]]
        errors = []
        for ticket in tickets:  # wait for all of them: no thread may write any more after the return
            try:
                ticket.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@cache
def shared(count: int | None = None) -> Hands:
    """Return the thread pool of this process. There is one pool for all optimizers, because they share the cores."""
    return Hands(count)


def _take(left: deque[T], do: Callable[[T], None]) -> None:
    """Process the remaining items one by one, without gradients; that mode is per thread."""
    torch.set_grad_enabled(False)
    while left:
        try:
            item = left.popleft()
        except IndexError:
            return  # another thread took it
        try:
            do(item)
        except BaseException:
            left.clear()  # the remaining results would be useless
            raise


def compute_alone() -> None:
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
