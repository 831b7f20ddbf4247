"""Writer of all ranks together through MPI-IO: one file, opened and written by collective calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format.chunks import WrittenChunk, as_written, check_written, checksums
from hpctrain.checkpoint.format.layout import Written
from hpctrain.checkpoint.format.plan import FileChunk, Offsets, Target, WriteShare
from hpctrain.checkpoint.format.writer import ShareWriter, open_private, write_errors
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.transport.mpi import MpiFile, MpiTransport

BATCH = 64 << 20  # bytes that a rank passes to MPI per call


class MpiIoWriter(ShareWriter):
    """Writer of all ranks together through MPI-IO, within the call."""

    def __init__(self, transport: MpiTransport, hints: Mapping[str, str]) -> None:
        super().__init__()
        self._transport, self._hints = transport, hints

    def write(self, target: Target, offsets: Offsets | None = None) -> None:
        """Write this rank's share. Collective: every rank completes the call, even if one of them has failed."""
        assert offsets is not None, "all ranks know the layout before they write"
        self._start(self._write, target, self._share, offsets)

    def _write(self, target: Target, share: WriteShare, offsets: Offsets) -> Written:
        with write_errors(target):
            size = max(self._transport.all_gather_object(end_of(share, offsets)))
            rows = self._write_batches(target, size, share.chunks(offsets))
            with open_private(target) as handle:
                check_written(handle, rows)
        return as_written(rows)

    def _write_batches(self, target: Target, size: int, chunks: Iterable[FileChunk]) -> list[WrittenChunk]:
        """Write batches until no rank has more; if a rank fails, all ranks stop after the same batch."""
        file, rows = self._create(target, size), list[WrittenChunk]()
        failure: Exception | None = None
        source = batches(chunks)
        try:
            while True:
                batch: list[FileChunk] = []
                try:
                    batch = next(source, []) if failure is None else []
                except Exception as error:
                    failure = error
                state = self._transport.all_gather_object((bool(batch), failure is not None))
                if any(failed for _, failed in state) or not any(more for more, _ in state):
                    break
                try:
                    file.write([(chunk.offset, chunk.data) for chunk in batch])
                    rows += checksums(batch)
                except Exception as error:
                    failure = error
        finally:
            file.close()
        if failure is not None:
            raise failure
        return rows

    def _create(self, target: Target, size: int) -> MpiFile:
        """Create the file, or raise if a rank could not create it."""
        file: MpiFile | None = None
        failure: Exception | None = None
        try:
            file = self._transport.create_file(target.private, size, self._hints)
        except Exception as error:
            failure = error
        failed = [rank for rank, each in enumerate(self._transport.all_gather_object(failure is not None)) if each]
        if failure is not None:
            raise failure
        if failed or file is None:
            raise CheckpointError(f"rank {failed[0]} could not open the file")
        return file


def end_of(share: WriteShare, offsets: Offsets) -> int:
    """Return the offset in the file at which a share ends."""
    ends = [0]
    for part in share.parts:
        source = share.sources[part.box]
        start = offsets[source.path] or 0
        ends += [start + to + length for to, _, length in source.byte_ranges(part.begin, part.end)]
    return max(ends)


def batches(chunks: Iterable[FileChunk], most: int = BATCH) -> Iterator[list[FileChunk]]:
    """Yield lists of byte ranges, each of about ``most`` bytes."""
    batch: list[FileChunk] = []
    nbytes = 0
    for chunk in chunks:
        batch.append(chunk)
        nbytes += len(chunk.data)
        if nbytes >= most:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
