"""Count what travels: calls and bytes by operation, so that tests can compare them with a formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Recorder:
    """Hold how often each operation ran on this rank and how many bytes it handed over.

    ``calls["send"]`` and ``bytes["send"]`` count what this rank gave to the transport; ``"window"`` counts the bytes
    that this rank wrote into node memory for others, and ``"handover"`` those it wrote there for one (``slots``).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, operation: str, nbytes: int) -> None:
        """Add one call of ``nbytes``."""
        self.calls[operation] += 1
        self.bytes[operation] += nbytes


class Recordable:
    """Be a thing that counts into a recorder while one is attached, and costs one test while none is."""

    recorder: Recorder | None = None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Attach a fresh recorder for the length of a ``with`` block."""
        before, self.recorder = self.recorder, Recorder()
        try:
            yield self.recorder
        finally:
            self.recorder = before
