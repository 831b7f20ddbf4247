"""Fake device that computes at once and copies as late as it may: only when a stream or the host waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from fakes.streams import FakeEvent, FakeStream, LazyStreams
from torch import Tensor


class LateDevice(LazyStreams):
    """Device that queues copies and fills their targets with garbage, so that a premature read is noticed.

    ``log`` lists the copies in the order of their requests, ``most`` is the largest number of copies under way at once
    per direction, and ``nbytes`` the size of the largest. The first stream created is the one down.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        super().__init__(device)
        self.tell: Callable[[str], object] = lambda what: None
        self.under_way: dict[str, int] = {"down": 0, "up": 0}
        self.most: dict[str, int] = dict(self.under_way)
        self.nbytes = 0
        self._lock = threading.RLock()

    def new(self) -> FakeStream:
        self.streams.append(FakeStream("down" if len(self.streams) % 2 else "up"))
        return self.streams[-1]

    def record(self, stream: FakeStream) -> FakeEvent:
        with self._lock:
            self._events += 1
            event = FakeEvent(f"event{self._events}", occurred=not stream.queue)
            if stream.queue:
                stream.queue.append(event)
            return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if stream is self.caller:
            self._until(event)
        elif not event.occurred:
            with self._lock:
                stream.queue.append(lambda: self._until(event))

    def done(self, event: FakeEvent) -> bool:
        self._until(event)  # time passes while a caller polls
        return True

    def synchronize(self, event: FakeEvent) -> None:
        self._until(event)

    def copy(self, target: Tensor, source: Tensor, stream: FakeStream) -> None:
        assert target.dtype is source.dtype and target.numel() == source.numel()
        if target.is_floating_point():
            target.fill_(torch.nan)
        self.log.append(f"{stream.name} {source.numel()}")
        self.tell(stream.name)
        self.nbytes = max(self.nbytes, source.nbytes)
        self.under_way[stream.name] += 1
        self.most[stream.name] = max(self.most[stream.name], self.under_way[stream.name])

        def do() -> None:
            target.copy_(source)
            self.under_way[stream.name] -= 1

        with self._lock:
            stream.queue.append(do)

    def _until(self, event: Any) -> None:
        with self._lock:
            super()._until(event)
