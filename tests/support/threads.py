"""Threads of one process as ranks: a transport that is strict about messages and keeps a simulated clock.

A rank's tensor is read when sender and receiver have met; the receiver's memory holds garbage until it has waited, and
the sender's must still be what it was. The clock follows a cost formula: ``alpha`` per message plus ``beta`` per
byte, one message at a time in each direction, independent of the threads' real time.
"""

from __future__ import annotations

import sys
import threading
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.transport.base import Finished, Recorder, Transport, Work
from hpctrain.errors import CommunicationError

PATIENCE = 20.0  # seconds that a rank waits for another before the test fails


class ThreadWorld:
    """World of ``size`` ranks that run a function; afterwards ``elapsed`` and ``recorders`` hold its cost."""

    def __init__(self, size: int, alpha: int = 1, beta: int = 0) -> None:
        self.size, self.alpha, self.beta = size, alpha, beta
        self.lock = threading.RLock()
        self.failed = False
        self.sends: dict[tuple[int, int, int], deque[ThreadSend]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[ThreadReceive]] = defaultdict(deque)
        self.works: list[ThreadWork] = []
        self.items: dict[int, dict[int, Any]] = defaultdict(dict)
        self.transports = [ThreadTransport(self, rank) for rank in range(size)]

    @property
    def elapsed(self) -> int:
        """Return the simulated time at which the last rank was ready."""
        return max(transport.clock for transport in self.transports)

    @property
    def recorders(self) -> list[Recorder]:
        """Return what each rank counted."""
        return [transport.recorder for transport in self.transports if transport.recorder is not None]

    def run(self, body: Callable[[ThreadTransport], Any]) -> list[Any]:
        """Return what the function returned on every rank; raise the first error of any."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(transport: ThreadTransport) -> None:
            transport.recorder = Recorder()
            try:
                results[transport.rank] = body(transport)
            except BaseException as error:  # pytest's failures derive from BaseException only
                with self.lock:
                    errors.append(error)
                    self.failed = True
                    self.wake()

        threads = [threading.Thread(target=one, args=(transport,)) for transport in self.transports]
        interval = sys.getswitchinterval()
        try:
            sys.setswitchinterval(1e-4)  # a thread that is woken need not wait long for one that computes
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        if errors:
            raise errors[0]
        assert not any(self.sends.values()) and not any(self.receives.values()), "a message was never received"
        assert all(work.ended for work in self.works), "a message was never waited for"
        return results

    def wake(self) -> None:
        """Wake all ranks to check what they wait for; the caller holds the lock."""
        for transport in self.transports:
            transport.changed.notify_all()


class ThreadWork:
    """One end of a message; ``met`` is set when the other end has arrived."""

    def __init__(self, owner: ThreadTransport, tensor: Tensor) -> None:
        self.owner, self.tensor = owner, tensor
        self.met = self.ended = False

    def done(self) -> bool:
        """Return whether the operation has ended, without waiting."""
        with self.owner.world.lock:
            if self.met and not self.ended:
                self.end()
        return self.ended

    def wait(self) -> None:
        """Wait until the operation has ended."""
        with self.owner.world.lock:
            self.owner.until(lambda: self.met)
            if not self.ended:
                self.end()

    def end(self) -> None:
        """Release the memory."""
        self.ended = True


class ThreadSend(ThreadWork):
    """Outgoing message."""

    def __init__(self, owner: ThreadTransport, tensor: Tensor) -> None:
        super().__init__(owner, tensor)
        self.before = tensor.clone()
        self.start, self.arrival = owner.occupy_send_port(tensor.numel() * tensor.element_size())

    def end(self) -> None:
        super().end()
        self.owner.clock = max(self.owner.clock, self.arrival)
        assert torch.equal(raw(self.tensor), raw(self.before)), "memory changed while it was sent"


class ThreadReceive(ThreadWork):
    """Expected message."""

    def __init__(self, owner: ThreadTransport, tensor: Tensor) -> None:
        super().__init__(owner, tensor)
        self.content, self.start, self.arrival = raw(tensor), 0, 0
        self.content.fill_(0xA5)

    def match(self, message: ThreadSend) -> None:
        """Accept a message; the memory holds it only after the wait."""
        self.content, room = raw(message.tensor).clone(), raw(self.tensor)
        assert self.content.numel() == room.numel(), f"{self.content.numel()} bytes for a place of {room.numel()}"
        self.start, self.arrival = message.start, message.arrival
        self.met = message.met = True

    def end(self) -> None:
        super().end()
        raw(self.tensor).copy_(self.content)
        self.owner.clock = max(self.owner.clock, self.owner.occupy_receive_port(self.start, self.arrival))


class ThreadTransport(Transport):
    """One rank of a ``ThreadWorld``."""

    name = "threads"

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.changed = threading.Condition(world.lock)
        self.clock = self._sent_until = self._gathered = 0
        self._heard: list[tuple[int, int]] = []

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until another rank makes the condition true; the caller holds the lock."""
        if not self.changed.wait_for(lambda: self.world.failed or ready(), PATIENCE) or not ready():
            raise CommunicationError("another rank failed" if self.world.failed else "the other ranks did not come")

    def occupy_send_port(self, nbytes: int) -> tuple[int, int]:
        """Return the times of a message's departure and arrival, after this rank's earlier messages."""
        start = max(self.clock, self._sent_until)
        self._sent_until = start + self.world.alpha + nbytes * self.world.beta
        return start, self._sent_until

    def occupy_receive_port(self, start: int, arrival: int) -> int:
        """Return the time at which a message is received: in the first gap between others that is long enough."""
        length = arrival - start
        for begin, end in self._heard:
            if start + length <= begin:
                break
            start = max(start, end)
        if length:
            insort(self._heard, (start, start + length))
        return start + length

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return False: this transport carries messages and does not reduce."""
        return False

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return every rank's object."""
        world, self._gathered = self.world, self._gathered + 1
        with world.lock:
            items = world.items[self._gathered]
            items[self.rank] = item
            world.wake()
            self.until(lambda: len(items) == self.size)
        return [items[rank] for rank in range(self.size)]

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return self.all_gather_object(item)[root]

    def split(self, color: int, key: int) -> Transport:
        """Return a transport among the ranks of the same color, ordered by key."""
        alike = sorted((k, rank) for rank, (c, k) in enumerate(self.all_gather_object((color, key))) if c == color)
        ranks = [rank for _, rank in alike]
        mine = ThreadWorld(len(ranks), self.world.alpha, self.world.beta) if self.rank == ranks[0] else None
        world: ThreadWorld = self.all_gather_object(mine)[ranks[0]]
        return world.transports[ranks.index(self.rank)]

    def split_node(self) -> Transport:
        """Return a world of one rank: threads share memory in ways that processes do not."""
        return self.split(self.rank, 0)

    def abort(self, code: int) -> None:
        """Raise an error: there is no job to end."""
        raise AssertionError(f"aborted with {code}")

    def free(self) -> None:
        """Do nothing: there are no resources to release."""

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        with self.world.lock:
            send, key = ThreadSend(self, tensor), (self.rank, peer, tag)
            self.world.works.append(send)
            if self.world.receives[key]:
                self.world.receives[key].popleft().match(send)
                self.world.transports[peer].changed.notify_all()
            else:
                self.world.sends[key].append(send)
        return send

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        with self.world.lock:
            receive, key = ThreadReceive(self, tensor), (peer, self.rank, tag)
            self.world.works.append(receive)
            if self.world.sends[key]:
                receive.match(self.world.sends[key].popleft())
                self.world.transports[peer].changed.notify_all()
            else:
                self.world.receives[key].append(receive)
        return receive

    # The transport's own collectives take no simulated time.

    def _barrier(self) -> None:
        self.all_gather_object(None)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self.all_gather_object(tensor.clone())[root])

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        raise CommunicationError(f"threads do not reduce {tensor.dtype} by {op}")

    def _all_gather(self, out: Tensor, tensor: Tensor) -> None:
        torch.cat([piece.view(-1) for piece in self.all_gather_object(tensor.clone())], out=out.view(-1))

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        parts = self.all_gather_object(torch.split(tensor.clone().view(-1), list(sent)))
        pieces = [part[self.rank] for part in parts]
        assert [len(piece) for piece in pieces] == list(received), "ranks disagree about what is sent"
        torch.cat(pieces, out=out.view(-1))
        return Finished()


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
