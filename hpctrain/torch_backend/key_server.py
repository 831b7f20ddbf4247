"""Keys of a store, kept by rank 0: their table, the thread that answers requests, and the other ranks' side.

The other ranks send their requests on a communicator of their own. A thread of rank 0 answers them:
it looks for requests without pause while some arrive, then in pauses that grow to five milliseconds.

Note: counts of messages. A request of rank 0 sends none. One of another rank sends two, itself and
the reply, whatever its number of keys, whether it waits for a key, and whether it times out (rank 0
measures the time). At exit each rank sends one. A barrier of p ranks through the store
(``TORCH_DIST_INIT_BARRIER=1``; torch omits it by default) is 3p + 1 requests, thus 6p messages at
rank 0. A tree of stores
would only shorten that. ``MpiStore.barrier`` takes p requests.

Note: format of messages. ``marshal`` writes numbers, texts, bytes and lists of them,
and reading them, unlike with pickle, never calls a function that a message names.
"""

from __future__ import annotations

import itertools
import marshal
import math
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

SERVER = 0  # rank that keeps the keys
IDLE_SECONDS = 0.005  # pause between two looks for messages
BUSY_SECONDS = 0.002  # how long to look without pause after a request; then the pauses grow
SENDING_SECONDS = 0.0002  # pause while a large reply is on its way: MPI moves it only while it is called
ANSWER_SECONDS = 60.0  # how long after its timeout a request waits for the reply of a server that does not get the GIL
LEAVE_SECONDS = 5.0  # how long rank 0 answers others after the end of its program
MESSAGE_BYTES = 2**31 - 2**20  # MPI counts bytes in 32 bits; less the keys
REQUEST, NOTICE, REPLY = 0, 1, 2  # tags: requests; rank 0 has ended; first tag of replies, which requests name
REPLIES = 32000  # number of tags of replies; MPI guarantees 32,767 tags
NAMED = 3  # keys that an error names

OK, TIMED_OUT, REFUSED, ENDED = range(4)  # what a reply says
Reply = tuple[int, Any]
_NUMBER = re.compile(rb"\s*[+-]?[0-9]+")


@dataclass(eq=False, slots=True)
class KeyRequest:
    """Request to a table; its reply is called once."""

    operation: str
    arguments: tuple[Any, ...]
    deadline: float
    reply: Callable[[Reply], None]


class KeyTable:
    """Keys and queues, and the requests that wait for them."""

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self._message_bytes = message_bytes
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        # By the first key that each lacks: a key that is set concerns no other requests.
        self._waiting: dict[str, list[KeyRequest]] = {}
        self._earliest = math.inf  # no request that waits has an earlier deadline
        self._ending = self._ended = False

    def request(self, request: KeyRequest) -> None:
        """Reply now, or as soon as the keys that the request needs exist, or its deadline has passed."""
        with self._lock:
            if self._ended:
                request.reply((ENDED, None))
                return
            self._attempt(request, first=True)

    def expire(self) -> None:
        """Reply to the requests whose deadlines have passed."""
        now = time.monotonic()
        if now < self._earliest:
            return
        with self._lock:
            for request in self._take_waiting():
                if request.deadline > now:
                    self._attempt(request)
                else:
                    request.reply((TIMED_OUT, list(itertools.islice(self._lacking(request), NAMED + 1))))

    def end(self, *, answer: bool = False) -> None:
        """Reply to requests that wait, and to later ones, that the store has ended; with ``answer`` not if ready."""
        with self._lock:
            self._ending, self._ended = True, not answer
            for request in self._take_waiting():
                request.reply((ENDED, None))

    def _take_waiting(self) -> list[KeyRequest]:
        requests = list(itertools.chain.from_iterable(self._waiting.values()))
        self._waiting.clear()
        self._earliest = math.inf
        return requests

    def _attempt(self, request: KeyRequest, first: bool = False) -> None:
        try:
            if first and request.operation == "barrier":
                self._arrive(*request.arguments)
            lacking = next(iter(self._lacking(request)), None)
            reply = OK, getattr(self, f"_{request.operation}")(*request.arguments) if lacking is None else None
        except Exception as error:  # the thread must answer later requests, too
            lacking, reply = None, (REFUSED, str(error))
        if lacking is None:
            request.reply(reply)
        elif self._ending:
            request.reply((ENDED, None))
        else:
            # The key of a barrier is set whenever a rank arrives; only the last one wakes the others.
            self._waiting.setdefault(f"barrier {lacking}" if request.operation == "barrier" else lacking, []).append(
                request
            )
            self._earliest = min(self._earliest, request.deadline)

    def _lacking(self, request: KeyRequest) -> Iterable[str]:
        """Return the keys for which a request waits."""
        operation, arguments = request.operation, request.arguments
        if operation == "wait":
            return (key for key in arguments[0] if not self._exists(key))
        if operation == "multi_get":
            return (key for key in arguments[0] if key not in self._values)
        if operation == "queue_pop" and arguments[1] and not self._queues.get(arguments[0]):
            return arguments[:1]
        if operation == "barrier" and self._number(arguments[0]) < arguments[1]:
            return arguments[:1]
        return ()

    def _exists(self, key: str) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _wake(self, key: str) -> None:
        for request in self._waiting.pop(key, ()):
            self._attempt(request)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._wake(key)

    # Operations, as TCPStore defines them -----------------------------------------------------------------------------

    def _set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values):
            self._put(key, value)

    def _wait(self, keys: Sequence[str]) -> None:
        return

    def _multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = [self._values[key] for key in keys]
        self._check_size(sum(map(len, values)))
        return values

    def _number(self, key: str) -> int:
        value = self._values.get(key, b"0")
        if not _NUMBER.fullmatch(value):
            raise ValueError(f"the value of key {key!r} is no whole number: {value[:20]!r}")
        return int(value)

    def _add(self, key: str, amount: int) -> int:
        total = self._number(key) + amount
        if not -(2**63) <= total < 2**63:
            raise ValueError(f"the sum has more than 64 bits: key {key!r}")
        self._put(key, str(total).encode())
        return total

    def _arrive(self, key: str, ranks: int) -> None:
        count = self._number(key) + 1
        self._put(key, str(count).encode())
        if count >= ranks:
            self._wake(f"barrier {key}")

    def _barrier(self, key: str, ranks: int) -> None:
        return

    def _append(self, key: str, value: bytes) -> None:
        before = self._values.get(key, b"")
        self._check_size(len(before) + len(value))
        self._put(key, before + value)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is None or current == expected:
            self._put(key, desired)
            return desired
        return current

    def _check(self, keys: Sequence[str]) -> bool:
        return all(map(self._exists, keys))

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)

    def _list_keys(self) -> list[str]:
        return list(self._values)

    def _queue_push(self, key: str, value: bytes) -> None:
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key)

    def _queue_pop(self, key: str, block: bool) -> bytes | None:
        queue = self._queues.get(key)
        return queue.popleft() if queue else None

    def _queue_len(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def _check_size(self, size: int) -> None:
        if size > self._message_bytes:
            raise ValueError(f"{size:,} bytes are more than one message holds ({self._message_bytes:,})")


class KeyServer:
    """Table of rank 0, and the thread that answers the other ranks' requests."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._table = KeyTable()
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._lock = threading.Lock()
        self._present = set(range(comm.Get_size())) - {SERVER}  # ranks that may make requests
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="hpctrain store", daemon=True)
        if self._present:
            self._thread.start()

    def ask(self, operation: str, arguments: tuple[Any, ...], seconds: float) -> Reply:
        """Return the reply to a request of this rank."""
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        deadline = time.monotonic() + seconds
        self._table.request(KeyRequest(operation, arguments, deadline, replies.put))
        while True:
            try:
                return replies.get(timeout=min(max(deadline - time.monotonic(), 0.0), 3600.0))
            except queue.Empty:
                self._table.expire()

    def _serve(self) -> None:
        last = 0.0  # time of the last request
        while not self._stopped:
            if self._receive():
                last = time.monotonic()
                continue
            self._table.expire()
            _pause(time.monotonic() - last, SENDING_SECONDS if self._sending and self._unsent() else IDLE_SECONDS)

    def _receive(self) -> bool:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, REQUEST, status)
        if message is None:
            return False
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE])
        rank = status.Get_source()
        if not data:
            self._present.discard(rank)
            return True
        tag, operation, arguments, seconds = marshal.loads(data)
        request = KeyRequest(
            operation, arguments, time.monotonic() + seconds, lambda reply: self._send(rank, tag, marshal.dumps(reply))
        )
        self._table.request(request)
        return True

    def _send(self, rank: int, tag: int, data: bytes) -> None:
        sending = self._comm.Isend([data, MPI.BYTE], rank, tag)
        if not sending.Test():
            with self._lock:
                self._sending.append((sending, data))

    def _unsent(self) -> int:
        with self._lock:
            self._sending = [each for each in self._sending if not each[0].Test()]
            return len(self._sending)

    def leave(self, seconds: float) -> None:
        """Answer what can be answered until all ranks have left; notify those that have not after a while."""
        deadline = time.monotonic() + seconds
        self._table.end(answer=True)
        while self._present and time.monotonic() < deadline:
            time.sleep(0.001)
        self._table.end()
        for rank in list(self._present):
            self._send(rank, NOTICE, b"")
        while self._unsent() and time.monotonic() < deadline + LEAVE_SECONDS:
            time.sleep(0.001)
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()


class KeyClient:
    """Requests of a rank other than 0; each of its threads may wait for a reply."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._tags = itertools.cycle(range(REPLY, REPLY + REPLIES))
        self._used: set[int] = set()  # tags of requests in progress, and of those without a reply
        self._lock = threading.Lock()
        self._sending: list[tuple[MPI.Request, bytes]] = []  # requests without a reply
        self._ended = False

    def ask(self, operation: str, arguments: tuple[Any, ...], seconds: float) -> Reply:
        """Return the reply of rank 0 to a request."""
        if self._ended:
            return ENDED, None
        with self._lock:
            tag = next(tag for tag in self._tags if tag not in self._used)
            self._used.add(tag)
        data = marshal.dumps((tag, operation, arguments, seconds))
        sending = self._comm.Isend([data, MPI.BYTE], SERVER, REQUEST)
        size = None
        try:
            size = self._wait(tag, sending, seconds + ANSWER_SECONDS)
        finally:
            if size is None:  # also if the wait was interrupted: the memory must stay valid, and the tag unused
                self._sending.append((sending, data))
        if size is None:
            return ENDED, None
        sending.Wait()
        reply = bytearray(size)
        self._comm.Recv([reply, MPI.BYTE], SERVER, tag)
        with self._lock:
            self._used.discard(tag)
        status, value = marshal.loads(reply)
        return status, value

    def _wait(self, tag: int, sending: MPI.Request, seconds: float) -> int | None:
        """Return the size of the reply, or None if rank 0 has ended without one."""
        status = MPI.Status()
        start, sent = time.monotonic(), False
        while not self._comm.Iprobe(SERVER, tag, status):
            waited = time.monotonic() - start
            if self._has_ended() and not self._comm.Iprobe(SERVER, tag, status):
                return None
            if waited > seconds:
                raise dist.DistNetworkError(
                    f"rank {SERVER}, which keeps the store, has not answered for {waited:.0f} s"
                )
            sent = sent or sending.Test()
            _pause(waited, IDLE_SECONDS if sent else 0.0)
        return status.Get_count(MPI.BYTE)

    def _has_ended(self) -> bool:
        notice = None if self._ended else self._comm.Improbe(SERVER, NOTICE)
        if notice is not None:
            notice.Recv([bytearray(), MPI.BYTE])
            self._ended = True
        return self._ended

    def leave(self, seconds: float) -> None:
        """Notify rank 0 that this rank makes no more requests."""
        if not self._has_ended():
            self._comm.Isend([b"", MPI.BYTE], SERVER, REQUEST).Test()


def _pause(waited: float, most: float) -> None:
    """Let others use the core: for a tenth of the time waited so far, but not longer than ``most`` seconds."""
    if waited < BUSY_SECONDS or most == 0.0:
        os.sched_yield()  # time.sleep(0) takes 50 us or more
    else:
        time.sleep(min(waited / 10, most))
