"""Queue of one node's operations: each rank does its part of an operation once all ranks have started it.

All ranks start the same operations in the same order. An operation may remain in progress: it
progresses whenever any pending operation is polled, so a rank that arrives late finds the others at
work instead of waiting. A part that must wait for another node yields its ``Work`` and remains in
progress too. A rank that blocked there would delay the collective that the other node is executing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hpctrain.comm.transport.base import Chain, Work
from hpctrain.comm.transport.waiting import waiting
from hpctrain.comm.transport.window import NodeMemory

# Part of one rank, called once all ranks have arrived; yields each ``Work`` that it must wait for.
LocalPart = Callable[[], Iterator[Work] | None]


class NodeQueue:
    """Queue that starts and progresses the operations of one node."""

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._pending: deque[_PendingOperation] = deque()

    def start(self, operation: str, part: LocalPart, *held: object) -> Work:
        """Start an operation and leave it in progress; keep ``held`` alive until it completes."""
        pending = _PendingOperation(self, operation, part, self.memory.arrive(), held)
        self._pending.append(pending)
        return pending

    def run(self, operation: str, part: LocalPart) -> None:
        """Execute an operation; return when all ranks have done their parts."""
        if self._pending:
            self.start(operation, part).wait()
            return
        memory = self.memory
        number = memory.arrive()
        waiting.begin(operation)
        try:
            memory.await_arrived(number, operation)
            works = part()
            if works is not None:
                for work in works:
                    work.wait()
            memory.finish(number)
            memory.await_finished(number, operation)
        finally:
            waiting.end()

    def synchronize(self, operation: str) -> None:
        """Wait until all ranks have arrived and have done their parts of all earlier operations."""
        self.drain()
        number = self.memory.arrive()
        self.memory.finish(number)
        with waiting(operation):
            self.memory.await_arrived(number, operation)

    def drain(self) -> None:
        """Complete all pending operations."""
        while self._pending:
            self._pending[-1].wait()

    def progress(self) -> None:
        """Do this rank's part of every operation that all ranks have started; do not block."""
        while self._pending and self.memory.all_arrived(self._pending[0].number):
            first = self._pending[0]
            with waiting(first.operation):
                if not first.advance():
                    return
            self.memory.finish(self._pending.popleft().number)


class _PendingOperation:
    """Operation in progress (``Work``)."""

    def __init__(
        self, queue: NodeQueue, operation: str, part: LocalPart, number: int, held: tuple[object, ...]
    ) -> None:
        self._queue = queue
        self._part = part
        self._held = held
        self._works: Chain | None = None
        self._started = False
        self.operation = operation
        self.number = number

    def advance(self) -> bool:
        """Do what can be done of this rank's part; return whether the part is complete."""
        if not self._started:
            self._started = True
            works = self._part()
            self._works = None if works is None else Chain(works)
        return self._works is None or self._works.done()

    def done(self) -> bool:
        """Progress without blocking; return whether all ranks have done their parts."""
        self._queue.progress()
        return self._queue.memory.all_finished(self.number)

    def wait(self) -> None:
        """Return when all ranks have done their parts."""
        self._queue.memory.wait(self.done, self.operation, self.number)
