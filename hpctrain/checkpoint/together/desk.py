"""File writer: one process's part in writing a checkpoint: make the layout, write a share, complete the file.

This module needs neither torch nor MPI, so that a separate process can do the work while the rank
continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.checkpoint.file import commit, layout, pour
from hpctrain.checkpoint.file.attributes import Value
from hpctrain.checkpoint.file.draft import Draft, Groups
from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.file.pour import Stretch
from hpctrain.checkpoint.file.writer import put
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard
from hpctrain.util import atomic
from hpctrain.util.claim import Claim


@dataclass(frozen=True)
class Place:
    """Target of a checkpoint: its path, the private name under which it is written, and the bytes of its tensors."""

    target: Path
    private: Path
    nbytes: int


@dataclass(frozen=True)
class Order:
    """Request to write: datasets with further attributes by path, and groups with their attributes."""

    place: Place
    datasets: Sequence[Shard]
    groups: Groups
    attributes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    alignment: int = layout.ALIGNMENT
    create: bool = True  # the private file; if false, its writers create it
    claim: Claim | None = None  # on the folder: checked before the file is renamed to its target


class Desk:
    """File writer: one process's part of one checkpoint at a time.

    Every error is raised as the ``CheckpointError`` to show: the path, the reason, and the missing
    space if the disk is full.
    """

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._place: Place | None = None
        self._claim: Claim | None = None

    def lay_out(self, order: Order) -> dict[str, int | None]:
        """Return the offset of each dataset in the file; for rank 0."""
        self._place, self._claim = order.place, order.claim
        with explaining(order.place):
            self._draft = Draft(order.datasets, order.attributes, order.groups, order.alignment)
        return {dataset.name: at for dataset, at in zip(order.datasets, self._draft.places)}

    def write(self, place: Place, stretches: Iterable[Stretch]) -> Written:
        """Write a share into the private file, verify and flush it; return the written byte ranges."""
        with explaining(place):
            with opened(place.private) as handle:
                rows = pour.pour(handle, stretches)
                os.fsync(handle)  # by the descriptor that wrote: only that one reports failures
        return pour.written(rows)

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
        commit.flush_folder(place.target)

    def give_up(self) -> None:
        """Drop the current checkpoint and remove its private file."""
        if self._draft is not None:
            self._draft.close()
        if self._place is not None:
            atomic.discard(self._place.private)
        self._draft = self._place = None


def create(order: Order) -> None:
    """Create the empty private file; for rank 0."""
    place = order.place
    with explaining(place):
        commit.prepare(place.target)
        if order.create:
            os.close(atomic.create(place.private))


def clear(place: Place) -> None:
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
def explaining(place: Place) -> Iterator[None]:
    """Convert any error of the filesystem to the one that names the checkpoint and the reason."""
    try:
        yield
    except Exception as error:
        raise commit.explained(error, place.target, place.private, place.nbytes) from error
