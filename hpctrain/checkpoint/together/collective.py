"""Writing of a rank's share by collective MPI-IO, which some parallel filesystems handle best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.checkpoint.file import pour
from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.file.pour import Row, Stretch
from hpctrain.checkpoint.file.writer import stretches
from hpctrain.checkpoint.together.desk import Place, explaining, opened
from hpctrain.checkpoint.together.worker import Here, Places, Share
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.transport.mpi import MpiTransport
    from hpctrain.transport.mpi_file import MpiFile

BATCH = 64 << 20  # bytes that a rank passes to MPI per call


class Collective(Here):
    """Inline writer like ``Here``, but all ranks write together through MPI-IO."""

    def __init__(self, transport: MpiTransport, hints: Mapping[str, str]) -> None:
        super().__init__()
        self._transport, self._hints = transport, hints

    def write(self, place: Place, places: Places) -> None:
        """Write this rank's share. Collective: every rank completes the call, even if one of them has failed."""
        self._do(lambda: self._write(place, self._share, places))

    def _write(self, place: Place, share: Share, places: Places) -> Written:
        with explaining(place):
            size = max(self._transport.all_gather_object(end_of(share, places)))
            rows = self._pour(place, size, stretches(share.sources, share.parts, places))
            with opened(place.private) as handle:
                pour.check(handle, rows)
        return pour.written(rows)

    def _pour(self, place: Place, size: int, mine: Iterable[Stretch]) -> list[Row]:
        """Write batches until no rank has more; if a rank fails, all ranks stop after the same batch."""
        file, rows = self._create(place, size), list[Row]()
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
                    rows += pour.sums(batch)
                except Exception as error:
                    failure = error
        finally:
            file.close()
        if failure is not None:
            raise failure
        return rows

    def _create(self, place: Place, size: int) -> MpiFile:
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


def end_of(share: Share, places: Places) -> int:
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
