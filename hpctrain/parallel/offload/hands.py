"""Have slices of memory worked on by several threads at once, each of which takes the next one when it is done.

Note: why not torch's own threads. They meet after every call, and a slice that fits into a cache takes a call some 50
microseconds: where a core is busy otherwise, all wait for it each time, and an update that should take 40 ms has been
seen to take 1000. Here threads meet once, at the end, and each computes its calls by itself.
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
    """Be ``count`` threads, by default as many as torch computes with."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or torch.get_num_threads()
        self._workers = [Worker(f"hpctrain-hand-{number}", compute_alone) for number in range(self.count)]

    def each(self, do: Callable[[T], None], items: Sequence[T]) -> None:
        """Call ``do`` with every item, in no certain order; raise what the first failing call raised."""
        if min(self.count, len(items)) < 2:
            for item in items:
                do(item)
            return
        left = deque(items)
        tickets = [worker.submit(lambda: _take(left, do)) for worker in self._workers[: len(items)]]
        errors = []
        for ticket in tickets:  # all of them, for nobody may write any more when this returns
            try:
                ticket.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@cache
def shared(count: int | None = None) -> Hands:
    """Return the hands of this process: there are no more cores, however many optimizers there are."""
    return Hands(count)


def _take(left: deque[T], do: Callable[[T], None]) -> None:
    """Do what is left, item by item; without gradients, as each thread has to say for itself."""
    torch.set_grad_enabled(False)
    while left:
        try:
            item = left.popleft()
        except IndexError:
            return  # another hand was faster
        try:
            do(item)
        except BaseException:
            left.clear()  # nobody can use the rest
            raise


def compute_alone() -> None:
    """Let torch use no other threads for what this thread calls.

    ``torch.set_num_threads`` would change the number for threads to come and for MKL in the whole process; OpenMP's own
    call is about the calling thread alone. Without OpenMP everything stays right, and slices are shared out twice.
    """
    torch.get_num_threads()  # at its first call in a thread torch sets the number, which would undo this
    try:
        ctypes.CDLL(None).omp_set_num_threads(1)
    except AttributeError:
        pass
