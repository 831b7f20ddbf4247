"""Counters of calls and bytes per operation, which tests compare with cost formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Recorder:
    """Numbers of calls and bytes of each operation on this rank.

    ``calls["send"]`` and ``bytes["send"]`` count the data that this rank passed to the transport.
    ``"window"`` counts the bytes that this rank wrote into node memory for several ranks, and
    ``"handover"`` those for one rank (``slots``).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, operation: str, nbytes: int) -> None:
        """Add one call of ``nbytes``."""
        self.calls[operation] += 1
        self.bytes[operation] += nbytes


class Recordable:
    """Mixin that reports calls and bytes to an attached recorder; otherwise one ``is None`` check."""

    recorder: Recorder | None = None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Attach a new recorder for the duration of a ``with`` block."""
        before, self.recorder = self.recorder, Recorder()
        try:
            yield self.recorder
        finally:
            self.recorder = before
