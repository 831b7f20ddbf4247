"""Collective save of one checkpoint: all ranks write one file, in steps that they make together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpctrain.checkpoint.file_writer import (
    InlineWriter,
    Places,
    ShareWriter,
    Target,
    WriteRequest,
    WriteShare,
    clear,
    create,
    explaining,
    opened,
)
from hpctrain.checkpoint.format import writer
from hpctrain.checkpoint.format.integrity import Written
from hpctrain.checkpoint.format.writer import Stretch, WrittenRange, stretches
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.transport.mpi import MpiFile, MpiTransport

BATCH = 64 << 20  # bytes that a rank passes to MPI per call


class Collective(InlineWriter):
    """Inline writer like ``InlineWriter``, but all ranks write together through MPI-IO."""

    def __init__(self, transport: MpiTransport, hints: Mapping[str, str]) -> None:
        super().__init__()
        self._transport, self._hints = transport, hints

    def write(self, place: Target, places: Places) -> None:
        """Write this rank's share. Collective: every rank completes the call, even if one of them has failed."""
        self._do(lambda: self._write(place, self._share, places))

    def _write(self, place: Target, share: WriteShare, places: Places) -> Written:
        with explaining(place):
            size = max(self._transport.all_gather_object(end_of(share, places)))
            rows = self._pour(place, size, stretches(share.sources, share.parts, places))
            with opened(place.private) as handle:
                writer.check_written(handle, rows)
        return writer.written(rows)

    def _pour(self, place: Target, size: int, mine: Iterable[Stretch]) -> list[WrittenRange]:
        """Write batches until no rank has more; if a rank fails, all ranks stop after the same batch."""
        file, rows = self._create(place, size), list[WrittenRange]()
        failure: Exception | None = None
        source = batches(mine)
        try:
            while True:
                batch: list[Stretch] = []
                try:
                    batch = next(source, []) if failure is None else []
                except Exception as error:
                    failure = error
                state = self._transport.all_gather_object((bool(batch), failure is not None))
                if any(failed for _, failed in state) or not any(more for more, _ in state):
                    break
                try:
                    file.write([(stretch.offset, stretch.data) for stretch in batch])
                    rows += writer.sums(batch)
                except Exception as error:
                    failure = error
        finally:
            file.close()
        if failure is not None:
            raise failure
        return rows

    def _create(self, place: Target, size: int) -> MpiFile:
        """Create the file, or raise if a rank could not create it."""
        file: MpiFile | None = None
        failure: Exception | None = None
        try:
            file = self._transport.create_file(place.private, size, self._hints)
        except Exception as error:
            failure = error
        failed = [rank for rank, each in enumerate(self._transport.all_gather_object(failure is not None)) if each]
        if failure is not None:
            raise failure
        if failed or file is None:
            raise CheckpointError(f"rank {failed[0]} could not open the file")
        return file


def end_of(share: WriteShare, places: Places) -> int:
    """Return the offset in the file at which a share ends."""
    ends = [0]
    for part in share.parts:
        source = share.sources[part.box]
        ends += [(places[source.path] or 0) + to + length for to, _, length in source.stretches(part.begin, part.end)]
    return max(ends)


def batches(mine: Iterable[Stretch], most: int = BATCH) -> Iterator[list[Stretch]]:
    """Yield lists of byte ranges, each of about ``most`` bytes."""
    batch: list[Stretch] = []
    held = 0
    for stretch in mine:
        batch.append(stretch)
        held += len(stretch.data)
        if held >= most:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# Collective save of one checkpoint: all ranks write one file, in steps that they make together ------------------------
#
# Rank 0 makes the layout, every rank writes its share, and rank 0 completes the file and renames it
# to its target. Between these steps the ranks exchange their outcome: an error on one rank is raised
# on all, and the file is removed.
#
# Note: writing without waiting. The offset of a dataset depends only on the datasets before it and on
# itself. So within a run each file has its tensors at the same offsets as the previous file. Then no
# rank waits for the layout: all ranks write while rank 0 makes it. The layout is compared with the
# expected one; if it differs, the shares are written again.


T = TypeVar("T")


@dataclass(frozen=True)
class RankSave:
    """A rank's part of a checkpoint: its share, and on rank 0 the write request for the file.

    ``expected`` contains the expected offsets of the model and optimizer datasets, on all ranks or
    on no rank.
    """

    share: WriteShare
    order: WriteRequest | None
    expected: Places | None = None


class CollectiveSave:
    """Collective save in progress; created by all ranks, which then all call ``advance`` until it is ``done``.

    ``advance`` waits for this rank's worker; while the worker is ``busy``, the rank can do other
    work. ``places`` are the offsets of the datasets, once they are known.
    """

    def __init__(self, comm: Communicator, worker: ShareWriter, job: RankSave) -> None:
        self._comm, self._worker, self._job = comm, worker, job
        self.done = False
        self.places: Places | None = None
        self._moves: Iterator[Callable[[], None]] = iter((self._write, self._finish, self._end))
        self._together(lambda: worker.take(job.share))
        # The file exists before any rank opens it.
        self._together(lambda: create(job.order) if job.order is not None else None)
        own = job.order.place if job.order is not None else None
        self._place: Target = comm.broadcast_object(own)
        if job.order is not None:
            worker.lay_out(job.order)
        if job.expected is not None:
            self._moves = iter((self._compare, self._end))
            if job.order is None:
                worker.write(self._place, job.expected)
            else:
                worker.write_as_laid_out(self._place)

    @property
    def busy(self) -> bool:
        """Return whether this rank's worker has not finished the current step."""
        return not self.done and self._worker.busy

    def advance(self) -> None:
        """Make the next step. Collective. If a rank failed, all ranks raise the same error."""
        next(self._moves)()

    def _write(self) -> None:
        places = self._together(lambda: self._worker.result() if self._first else None)
        self.places = self._comm.broadcast_object(places)
        assert self.places is not None
        self._worker.write(self._place, self.places)

    def _compare(self) -> None:
        """Compare the layout with the expected one; if it differs, write again. Then complete the file."""
        laid_out = self._together(lambda: self._worker.result() if self._first else None)
        expected = self._job.expected
        assert expected is not None
        moved = laid_out is not None and any(laid_out[name] != place for name, place in expected.items())
        self.places = self._comm.broadcast_object(laid_out if moved else None) or expected
        if self.places is not expected:
            self._together(self._worker.result, alike=False)
            self._together(lambda: clear(self._place) if self._first else None)
            self._worker.write(self._place, self.places)
        self._finish()

    def _finish(self) -> None:
        written = self._together(self._worker.result, alike=False)
        everything = np.concatenate(self._comm.all_gather_object(written))
        if self._first:
            self._worker.finish(everything)

    def _end(self) -> None:
        self._together(lambda: self._worker.result() if self._first else None)
        self.done = True

    @property
    def _first(self) -> bool:
        return self._comm.rank == 0

    def _together(self, action: Callable[[], T], *, alike: bool = True) -> T:
        """Run an action that may fail; if it fails on any rank, drop the checkpoint and raise on all ranks."""
        try:
            return agreed(self._comm, action, alike=alike)
        except BaseException:
            self.done = True
            self._worker.give_up()
            raise
