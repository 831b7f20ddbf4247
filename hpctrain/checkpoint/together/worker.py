"""Say how a rank has its part of a checkpoint done: here and now, or by a process of its own while it goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.file.source import Source
from hpctrain.checkpoint.file.writer import stretches
from hpctrain.checkpoint.together.desk import Desk, Order, Place
from hpctrain.checkpoint.together.plan import Part

Places = Mapping[str, "int | None"]


@dataclass(frozen=True)
class Share:
    """Hold what a rank writes: parts of its sources."""

    sources: Sequence[Source]
    parts: Sequence[Part]


class Worker(Protocol):
    """Do one thing after another for a rank; ``result`` ends what the earliest call has begun that has not been ended.

    One checkpoint takes ``take``, then ``lay_out`` on rank 0, ``write`` everywhere, ``finish`` on rank 0.
    """

    def take(self, share: Share) -> None:
        """Get hold of what to write. A worker that goes on beside the rank copies it."""

    def lay_out(self, order: Order) -> None:
        """Begin to lay the file out; the result says where each dataset belongs."""

    def write(self, place: Place, places: Places) -> None:
        """Begin to write what was taken; the result says what was written."""

    def write_as_laid_out(self, place: Place) -> None:
        """Begin to write what was taken, to the places that the layout before it says."""

    def finish(self, written: Written) -> None:
        """Begin to complete the file; it is in its place when that has ended."""

    @property
    def busy(self) -> bool:
        """Tell whether anything that was begun is still under way."""

    def result(self) -> Any:
        """Wait for the earliest and return its result, or raise its error."""

    def give_up(self) -> None:
        """Drop what is under way, and remove what there is of the file."""

    def close(self) -> None:
        """End, and drop what is under way."""


class Here:
    """Work in the rank itself, at once."""

    busy = False

    def __init__(self) -> None:
        self._desk = Desk()
        self._share = Share((), ())
        self._places: Places | None = None
        self._outcomes: deque[tuple[Any, Exception | None]] = deque()

    def take(self, share: Share) -> None:
        """Note what to write; nothing is copied."""
        self._share = share

    def lay_out(self, order: Order) -> None:
        """Lay the file out."""
        self._do(lambda: self._desk.lay_out(order))
        self._places = self._outcomes[-1][0]

    def write(self, place: Place, places: Places) -> None:
        """Write what was taken."""
        self._do(lambda: self._desk.write(place, stretches(self._share.sources, self._share.parts, places)))

    def write_as_laid_out(self, place: Place) -> None:
        """Write what was taken, if there is a layout."""
        if self._places is not None:
            self.write(place, self._places)
        else:
            self._outcomes.append((None, None))

    def finish(self, written: Written) -> None:
        """Complete the file."""
        self._do(lambda: self._desk.finish(written))
        self._share = Share((), ())

    def result(self) -> Any:
        """Return what came of the earliest call, or raise it."""
        outcome, error = self._outcomes.popleft()
        if error is not None:
            raise error
        return outcome

    def give_up(self) -> None:
        """Remove what there is of the file."""
        self._share = Share((), ())
        self._outcomes.clear()
        self._desk.give_up()

    def close(self) -> None:
        """Have nothing to end."""
        self.give_up()

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            self._outcomes.append((action(), None))
        except Exception as error:
            self._outcomes.append((None, error))
