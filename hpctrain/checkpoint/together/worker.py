"""Interface of the workers that write a rank's part of a checkpoint, and the inline one, which writes in the rank."""

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
    """The parts of a rank's sources that it writes: its share."""

    sources: Sequence[Source]
    parts: Sequence[Part]


class Worker(Protocol):
    """Sequential worker of a rank; ``result`` completes the earliest call without a result.

    One checkpoint takes ``take``, then ``lay_out`` on rank 0, ``write`` on all ranks, ``finish`` on
    rank 0.
    """

    def take(self, share: Share) -> None:
        """Accept the data to write. A worker in another process copies it."""

    def lay_out(self, order: Order) -> None:
        """Start to make the layout; the result is the offset of each dataset."""

    def write(self, place: Place, places: Places) -> None:
        """Start to write the share; the result is the list of written byte ranges."""

    def write_as_laid_out(self, place: Place) -> None:
        """Start to write the share to the offsets of the preceding layout."""

    def finish(self, written: Written) -> None:
        """Start to complete the file; it has its final name when the result is available."""

    @property
    def busy(self) -> bool:
        """Return whether a call that was started has not finished."""

    def result(self) -> Any:
        """Wait for the earliest call and return its result, or raise its error."""

    def give_up(self) -> None:
        """Drop pending work and remove the private file."""

    def close(self) -> None:
        """Drop pending work and end the worker."""


class Here:
    """Inline writer: the rank itself does the work, within the call."""

    busy = False

    def __init__(self) -> None:
        self._desk = Desk()
        self._share = Share((), ())
        self._places: Places | None = None
        self._outcomes: deque[tuple[Any, Exception | None]] = deque()

    def take(self, share: Share) -> None:
        """Store the share without a copy."""
        self._share = share

    def lay_out(self, order: Order) -> None:
        """Make the layout of the file."""
        self._do(lambda: self._desk.lay_out(order))
        self._places = self._outcomes[-1][0]

    def write(self, place: Place, places: Places) -> None:
        """Write the share."""
        self._do(lambda: self._desk.write(place, stretches(self._share.sources, self._share.parts, places)))

    def write_as_laid_out(self, place: Place) -> None:
        """Write the share if a layout exists."""
        if self._places is not None:
            self.write(place, self._places)
        else:
            self._outcomes.append((None, None))

    def finish(self, written: Written) -> None:
        """Complete the file."""
        self._do(lambda: self._desk.finish(written))
        self._share = Share((), ())

    def result(self) -> Any:
        """Return the result of the earliest call, or raise its error."""
        outcome, error = self._outcomes.popleft()
        if error is not None:
            raise error
        return outcome

    def give_up(self) -> None:
        """Remove the private file."""
        self._share = Share((), ())
        self._outcomes.clear()
        self._desk.give_up()

    def close(self) -> None:
        """Drop pending work."""
        self.give_up()

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            self._outcomes.append((action(), None))
        except Exception as error:
            self._outcomes.append((None, error))
