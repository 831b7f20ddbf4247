"""Reading of the next batches by a thread while the present one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Read = Callable[[int], tuple[T, int]]  # returns what is at a position, and the next position


class ReadAhead:
    """Function that returns what is at a position, and lets a thread read what follows, ``depth`` times ahead.

    Without ``depth``, there is no thread. Errors are raised when what could not be read is due.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Any]] = deque()
        self._position = -1  # of the first one of these

    def __call__(self, position: int, read: Read[T]) -> tuple[T, int]:
        """Return what is at ``position``, and the next position."""
        if not self._depth:
            return read(position)
        if self._position != position:  # the first one, or the run has been set back
            self._pending.clear()
        if not self._pending:
            self._submit(lambda: read(position))
        for _ in range(self._depth + 1 - len(self._pending)):
            before = self._pending[-1]
            self._submit(lambda before=before: read(before.result()[1]))  # type: ignore[misc]
        self._position = -1
        found: tuple[T, int] = self._pending.popleft().result()
        self._position = found[1]
        return found

    def _submit(self, call: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpctrain-read-ahead")
        self._pending.append(self._thread.submit(call))
