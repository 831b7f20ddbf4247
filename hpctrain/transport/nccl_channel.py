"""Hand operations to NCCL on a stream of its own, and find out when they have ended, or never will.

Note: NCCL's work and the caller's. Every operation is handed to the channel's own stream, which first waits for what
the caller's stream has computed; ``wait`` of its ``Work`` makes the caller's stream wait for it. The host waits in
neither (see the note in ``streams``), so ``done`` is how a program learns that an operation has ended, and ``check``
how it learns that one never will. Messages from rank to rank are held back until one of them is waited for, or the
next operation comes, and then go in one group: NCCL does the messages of one group at the same time, but those of two
groups one after the other, and there two ranks that send to each other would wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hpctrain.errors import CommunicationError, DeadlineError
from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.streams import Streams

Call = Callable[[Any, int], None]  # gives NCCL what it takes: communicator and stream


class NcclWork:
    """Be an operation on NCCL's stream, or one of a group that has not been handed to it yet."""

    def __init__(self, channel: NcclChannel, operation: str, tensors: Sequence[Tensor]) -> None:
        self._channel = channel
        self.operation = operation
        self.tensors = tensors
        self.event: Any = None
        self.launched = 0.0

    def done(self) -> bool:
        """Tell whether the result lies in memory; raise where NCCL has failed."""
        self._channel.flush()
        self._channel.check()
        return self._channel.streams.done(self.event)

    def wait(self) -> None:
        """Let the caller's stream, not the host, wait for the result."""
        self._channel.flush()
        self._channel.streams.wait(self._channel.streams.current(), self.event)


class NcclChannel:
    """Hold one communicator of NCCL and its stream; all of its ranks make it together."""

    def __init__(self, library: Any, streams: Streams, size: int, rank: int, unique: Sequence[int]) -> None:
        self.streams = streams
        self.library = library
        self._where = f"rank {rank} of {size}, {streams.device}"
        self._comm: Any = None
        self._held: list[tuple[NcclWork, Call]] = []
        self._under_way: deque[NcclWork] = deque()
        with waiting("nccl_init"), streams.entered(), self._translated("NCCL cannot start"):
            self._comm = library.NcclCommunicator(size, tuple(unique), rank)
        self._stream = streams.new()

    def start(self, operation: str, tensors: Sequence[Tensor], call: Call) -> NcclWork:
        """Hand an operation to the stream, behind all messages that were held back."""
        self.flush()
        work = NcclWork(self, operation, tensors)
        self._launch([work], call)
        return work

    def hold(self, operation: str, tensor: Tensor, call: Call) -> NcclWork:
        """Hold a message back for the next group."""
        work = NcclWork(self, operation, [tensor])
        self._held.append((work, call))
        return work

    def flush(self) -> None:
        """Hand the messages that are held back to the stream, in one group."""
        if self._held:
            held, self._held = self._held, []

            def together(comm: Any, stream: int) -> None:
                with self.group():
                    for _, call in held:
                        call(comm, stream)

            self._launch([work for work, _ in held], together)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Let NCCL do the calls of a ``with`` block at the same time; groups may lie in groups."""
        self.library.groupStart()
        try:
            yield
        finally:
            self.library.groupEnd()

    def check(self) -> None:
        """Raise where NCCL has failed, or an operation has not ended within ``HPCTRAIN_TIMEOUT``."""
        with self._translated("NCCL failed"):
            self._comm.check_async_error()
        while self._under_way and self.streams.done(self._under_way[0].event):
            self._under_way.popleft()
        late = self.overdue(timeout_seconds()) if self._under_way else ""
        if late:
            self.give_up()
            raise DeadlineError(late)

    def overdue(self, limit: float) -> str:
        """Return what has been on the stream for more than ``limit`` seconds, or an empty text.

        A watchdog may ask from its own thread: nothing is changed.
        """
        for work in list(self._under_way):
            if not self.streams.done(work.event):
                if time.monotonic() - work.launched <= limit:
                    return ""
                return f"nccl {work.operation} has not ended within {limit:g} s (HPCTRAIN_TIMEOUT) on {self._where}"
        return ""

    def give_up(self) -> None:
        """Stop NCCL's kernels on this rank: they would spin for ranks that do not come."""
        if self._comm is not None:
            self._comm.abort()

    def close(self) -> None:
        """Wait for what is under way, and give the communicator back; a call by all ranks."""
        self.flush()
        for work in self._under_way:
            self.streams.synchronize(work.event)
        self._under_way.clear()
        self._comm.destroy()

    def _launch(self, works: Sequence[NcclWork], call: Call) -> None:
        streams = self.streams
        if self._under_way:
            self.check()
        streams.wait(self._stream, streams.record(streams.current()))
        # The first operation of a kind connects the ranks, and NCCL waits for them here.
        with waiting(f"nccl_{works[0].operation}"), streams.entered(), self._translated("NCCL failed"):
            call(self._comm, streams.handle(self._stream))
        event = streams.record(self._stream)
        for work in works:
            work.event, work.launched = event, time.monotonic()
            for tensor in work.tensors:
                streams.keep(tensor, self._stream)
            work.tensors = ()
        self._under_way.append(works[-1])

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.give_up()
            raise CommunicationError(f"{what} on {self._where}: {error}") from error
