"""Fake device: a log of the operations on its streams, which a test can also execute late, as a device would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class FakeStream:
    """Stream of pending work: actions, and events that must have occurred before the next action."""

    name: str
    queue: list[Any] = field(default_factory=list)


@dataclass
class FakeEvent:
    name: str
    occurred: bool = False


class LazyStreams:
    """Streams that work only when waited for, and then only as far as needed: the laziest correct device.

    Work that no wait requires is never done, so that a missing wait shows as a wrong value.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self.device = device
        self.caller = FakeStream("caller")
        self.streams = [self.caller]
        self.log: list[str] = []
        self.recorded: list[tuple[int, str]] = []
        self._events = 0

    def current(self) -> FakeStream:
        return self.caller

    def new(self) -> FakeStream:
        self.streams.append(FakeStream(f"stream{len(self.streams)}"))
        return self.streams[-1]

    def handle(self, stream: FakeStream) -> int:
        return self.streams.index(stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        self._events += 1
        event = FakeEvent(f"event{self._events}")
        self.log.append(f"{event.name} after {stream.name}")
        stream.queue.append(event)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self.log.append(f"{stream.name} waits for {event.name}")
        stream.queue.append(lambda: self._until(event))

    def done(self, event: FakeEvent) -> bool:
        return event.occurred

    def synchronize(self, event: FakeEvent) -> None:
        self.log.append(f"host waits for {event.name}")
        self._until(event)

    def copy(self, target: Tensor, source: Tensor, stream: FakeStream) -> None:
        self.log.append(f"{stream.name} copies {source.numel()}")
        self.enqueue(stream, lambda: target.copy_(source))

    def keep(self, tensor: Tensor, stream: FakeStream) -> None:
        self.recorded.append((tensor.data_ptr(), stream.name))

    def pinned(self, nbytes: int) -> Tensor:
        self.log.append(f"pinned {nbytes}")
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.caller = self.caller, stream
        try:
            yield
        finally:
            self.caller = before

    def enqueue(self, stream: FakeStream | int, action: Callable[[], object]) -> None:
        """Enqueue work on a stream, which may be given by its handle."""
        found = self.streams[stream] if isinstance(stream, int) else stream
        found.queue.append(action)

    def finish(self) -> None:
        """Perform the work of the caller's stream and what it waits for, and no other work."""
        self._until(self.record(self.caller))

    def _until(self, event: FakeEvent) -> None:
        if event.occurred:
            return
        stream = next(stream for stream in self.streams if event in stream.queue)
        while not event.occurred:
            work = stream.queue.pop(0)
            if isinstance(work, FakeEvent):
                work.occurred = True
            else:
                work()
