"""Write a rank's share by collective calls of MPI, all ranks at once: what some parallel filesystems like best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.checkpoint.file import pour
from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.file.pour import Row, Stretch
from hpctrain.checkpoint.file.writer import stretches
from hpctrain.checkpoint.together.desk import Place, explaining, opened
from hpctrain.checkpoint.together.worker import Here, Places, Share

if TYPE_CHECKING:
    from hpctrain.transport.mpi import MpiTransport

BATCH = 64 << 20  # bytes that a rank hands to MPI at a time


class Collective(Here):
    """Work in the rank itself, as ``Here``, but write together with the other ranks."""

    def __init__(self, transport: MpiTransport, hints: Mapping[str, str]) -> None:
        super().__init__()
        self._transport, self._hints = transport, hints

    def write(self, place: Place, places: Places) -> None:
        """Write what was taken; a call by all ranks, of which each comes to the end even where one has failed."""
        self._do(lambda: self._write(place, self._share, places))

    def _write(self, place: Place, share: Share, places: Places) -> Written:
        with explaining(place):
            size = max(self._transport.all_gather_object(end_of(share, places)))
            rows = self._pour(place, size, stretches(share.sources, share.parts, places))
            with opened(place.private) as handle:
                pour.check(handle, rows)
        return pour.written(rows)

    def _pour(self, place: Place, size: int, mine: Iterable[Stretch]) -> list[Row]:
        """Write batch after batch, until no rank has more or one has failed."""
        file, rows = self._transport.create_file(place.private, size, self._hints), list[Row]()
        failure: Exception | None = None
        source = batches(mine)
        try:
            while failure is None:
                try:
                    batch = next(source, [])
                except Exception as error:
                    failure, batch = error, []
                state = self._transport.all_gather_object((bool(batch), failure is not None))
                if any(failed for _, failed in state) or not any(more for more, _ in state):
                    break
                try:
                    file.write([(stretch.offset, stretch.data) for stretch in batch])
                except OSError as error:
                    failure = error
                rows += pour.sums(batch)
        finally:
            file.close()
        if failure is not None:
            raise failure
        return rows


def end_of(share: Share, places: Places) -> int:
    """Return where in the file the last byte of a share ends."""
    ends = [0]
    for part in share.parts:
        source = share.sources[part.box]
        ends += [(places[source.path] or 0) + to + length for to, _, length in source.stretches(part.begin, part.end)]
    return max(ends)


def batches(mine: Iterable[Stretch], most: int = BATCH) -> Iterator[list[Stretch]]:
    """Yield stretches by the list, each of about so many bytes."""
    batch: list[Stretch] = []
    for stretch in mine:
        batch.append(stretch)
        if sum(len(each.data) for each in batch) >= most:
            yield batch
            batch = []
    if batch:
        yield batch
