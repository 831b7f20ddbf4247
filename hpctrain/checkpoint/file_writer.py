"""File writer: one process's part in writing a checkpoint, and the interface of the workers that write a rank's share.

This module needs neither torch nor MPI, so that a separate process can do the work while the rank
continues.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpctrain.checkpoint.format import layout, writer
from hpctrain.checkpoint.format.attributes import Value
from hpctrain.checkpoint.format.draft import Draft, Groups
from hpctrain.checkpoint.format.integrity import Written
from hpctrain.checkpoint.format.plan import BoxPart
from hpctrain.checkpoint.format.source import Source
from hpctrain.checkpoint.format.writer import Stretch, put, stretches
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard
from hpctrain.util import atomic
from hpctrain.util.claim import Claim


@dataclass(frozen=True)
class Target:
    """Target of a checkpoint: its path, the private name under which it is written, and the bytes of its tensors."""

    target: Path
    private: Path
    nbytes: int


@dataclass(frozen=True)
class WriteRequest:
    """Request to write: datasets with further attributes by path, and groups with their attributes."""

    place: Target
    datasets: Sequence[Shard]
    groups: Groups
    attributes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    alignment: int = layout.ALIGNMENT
    create: bool = True  # the private file; if false, its writers create it
    claim: Claim | None = None  # on the folder: checked before the file is renamed to its target


class FileWriter:
    """File writer: one process's part of one checkpoint at a time.

    Every error is raised as the ``CheckpointError`` to show: the path, the reason, and the missing
    space if the disk is full.
    """

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._place: Target | None = None
        self._claim: Claim | None = None

    def lay_out(self, order: WriteRequest) -> dict[str, int | None]:
        """Return the offset of each dataset in the file; for rank 0."""
        self._place, self._claim = order.place, order.claim
        with explaining(order.place):
            self._draft = Draft(order.datasets, order.attributes, order.groups, order.alignment)
        return {dataset.name: at for dataset, at in zip(order.datasets, self._draft.places)}

    def write(self, place: Target, stretches: Iterable[Stretch]) -> Written:
        """Write a share into the private file, verify and flush it; return the written byte ranges."""
        with explaining(place):
            with opened(place.private) as handle:
                rows = writer.pour(handle, stretches)
                os.fsync(handle)  # by the descriptor that wrote: only that one reports failures
        return writer.written(rows)

    def finish(self, written: Written) -> None:
        """Complete the file and rename it to its target, given all written byte ranges; for rank 0."""
        place, draft = self._place, self._draft
        assert place is not None and draft is not None
        with explaining(place):
            with opened(place.private) as handle:
                put(handle, draft, written)
                os.fsync(handle)
        if self._claim is not None:
            self._claim.check()
        with explaining(place):
            atomic.put(place.private, place.target)
        self._draft = self._place = None
        writer.flush_folder(place.target)

    def give_up(self) -> None:
        """Drop the current checkpoint and remove its private file."""
        if self._draft is not None:
            self._draft.close()
        if self._place is not None:
            atomic.discard(self._place.private)
        self._draft = self._place = None


def create(order: WriteRequest) -> None:
    """Create the empty private file; for rank 0."""
    place = order.place
    with explaining(place):
        writer.prepare_commit(place.target)
        if order.create:
            os.close(atomic.create(place.private))


def clear(place: Target) -> None:
    """Discard the contents of the private file; for rank 0."""
    with explaining(place):
        with opened(place.private) as handle:
            os.ftruncate(handle, 0)


@contextmanager
def opened(private: Path) -> Iterator[int]:
    """Open the file that is being written, for reading and writing."""
    try:
        handle = atomic.reopen(private)
    except FileNotFoundError:
        raise CheckpointError(
            "this rank does not see the file that rank 0 has made: the folder must be the same on all ranks, "
            "on a filesystem that they share"
        ) from None
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def explaining(place: Target) -> Iterator[None]:
    """Convert any error of the filesystem to the one that names the checkpoint and the reason."""
    try:
        yield
    except Exception as error:
        raise writer.explained(error, place.target, place.private, place.nbytes) from error


# Interface of the workers that write a rank's part of a checkpoint, and the inline one, which writes


Places = Mapping[str, "int | None"]


@dataclass(frozen=True)
class WriteShare:
    """The parts of a rank's sources that it writes: its share."""

    sources: Sequence[Source]
    parts: Sequence[BoxPart]


class ShareWriter(Protocol):
    """Sequential worker of a rank; ``result`` completes the earliest call without a result.

    One checkpoint takes ``take``, then ``lay_out`` on rank 0, ``write`` on all ranks, ``finish`` on
    rank 0.
    """

    def take(self, share: WriteShare) -> None:
        """Accept the data to write. A worker in another process copies it."""

    def lay_out(self, order: WriteRequest) -> None:
        """Start to make the layout; the result is the offset of each dataset."""

    def write(self, place: Target, places: Places) -> None:
        """Start to write the share; the result is the list of written byte ranges."""

    def write_as_laid_out(self, place: Target) -> None:
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


class InlineWriter:
    """Inline writer: the rank itself does the work, within the call."""

    busy = False

    def __init__(self) -> None:
        self._desk = FileWriter()
        self._share = WriteShare((), ())
        self._places: Places | None = None
        self._outcomes: deque[tuple[Any, Exception | None]] = deque()

    def take(self, share: WriteShare) -> None:
        """Store the share without a copy."""
        self._share = share

    def lay_out(self, order: WriteRequest) -> None:
        """Make the layout of the file."""
        self._do(lambda: self._desk.lay_out(order))
        self._places = self._outcomes[-1][0]

    def write(self, place: Target, places: Places) -> None:
        """Write the share."""
        self._do(lambda: self._desk.write(place, stretches(self._share.sources, self._share.parts, places)))

    def write_as_laid_out(self, place: Target) -> None:
        """Write the share if a layout exists."""
        if self._places is not None:
            self.write(place, self._places)
        else:
            self._outcomes.append((None, None))

    def finish(self, written: Written) -> None:
        """Complete the file."""
        self._do(lambda: self._desk.finish(written))
        self._share = WriteShare((), ())

    def result(self) -> Any:
        """Return the result of the earliest call, or raise its error."""
        outcome, error = self._outcomes.popleft()
        if error is not None:
            raise error
        return outcome

    def give_up(self) -> None:
        """Remove the private file."""
        self._share = WriteShare((), ())
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
