"""Keep the operations of one node in order: each rank does its share of one when all have come to it.

All ranks start the same operations in the same order. An operation may be left under way: it goes on whenever any of
them is asked after, so a rank that arrives late finds the others at work, not waiting. A share that has to wait for
another node says so and is left, too: a rank that waited there would hold up whatever collective the other node is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hpctrain.transport.activity import waiting
from hpctrain.transport.base import Chain, Work
from hpctrain.transport.window import NodeMemory

# What one rank does when all have come; yields each ``Work`` that must end before it can go on.
Share = Callable[[], Iterator[Work] | None]


class NodeQueue:
    """Start and carry on the operations of one node."""

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._pending: deque[_UnderWay] = deque()

    def start(self, operation: str, share: Share, *held: object) -> Work:
        """Start an operation and leave it under way, with what must live as long."""
        under_way = _UnderWay(self, operation, share, self.memory.arrive(), held)
        self._pending.append(under_way)
        return under_way

    def run(self, operation: str, share: Share) -> None:
        """Carry an operation out; return when all ranks have done their shares."""
        if self._pending:
            self.start(operation, share).wait()
            return
        memory = self.memory
        number = memory.arrive()
        waiting.begin(operation)
        try:
            memory.await_arrived(number, operation)
            links = share()
            if links is not None:
                for link in links:
                    link.wait()
            memory.finish(number)
            memory.await_finished(number, operation)
        finally:
            waiting.end()

    def meet(self, operation: str) -> None:
        """Wait until all ranks have come, and have done their shares of everything before."""
        self.drain()
        number = self.memory.arrive()
        self.memory.finish(number)
        with waiting(operation):
            self.memory.await_arrived(number, operation)

    def drain(self) -> None:
        """End everything that is under way."""
        while self._pending:
            self._pending[-1].wait()

    def progress(self) -> None:
        """Do this rank's share of every operation to which all ranks have come; wait for nobody."""
        while self._pending and self.memory.all_arrived(self._pending[0].number):
            first = self._pending[0]
            with waiting(first.operation):
                if not first.carry_on():
                    return
            self.memory.finish(self._pending.popleft().number)


class _UnderWay:
    """Be one operation under way (``Work``)."""

    def __init__(self, queue: NodeQueue, operation: str, share: Share, number: int, held: tuple[object, ...]) -> None:
        self._queue = queue
        self._share = share
        self._held = held
        self._links: Chain | None = None
        self._begun = False
        self.operation = operation
        self.number = number

    def carry_on(self) -> bool:
        """Do what can be done of this rank's share; tell whether that was the last of it."""
        if not self._begun:
            self._begun = True
            links = self._share()
            self._links = None if links is None else Chain(links)
        return self._links is None or self._links.done()

    def done(self) -> bool:
        """Do what can be done now, and tell whether all ranks have done theirs."""
        self._queue.progress()
        return self._queue.memory.all_finished(self.number)

    def wait(self) -> None:
        """Return when all ranks have done their shares."""
        self._queue.memory.wait(self.done, self.operation, self.number)
