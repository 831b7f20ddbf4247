"""Collective save of one checkpoint: all ranks write one file, in steps that they make together.

Rank 0 makes the layout, every rank writes its share, and rank 0 completes and commits the file.
Between these steps the ranks exchange their outcome: an error on one rank is raised on all, and the
file is removed.

Note: writing without waiting. The offset of a dataset depends only on the datasets before it and on
itself. So within a run each file has its tensors at the same offsets as the previous file. Then no
rank waits for the layout: all ranks write while rank 0 makes it. The layout is compared with the
expected one; if it differs, the shares are written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from hpctrain.checkpoint.format.integrity import Written
from hpctrain.checkpoint.format.plan import BoxPart, Source
from hpctrain.checkpoint.format.writer import (
    FileChunk,
    FileWriter,
    Offsets,
    Target,
    WriteRequest,
    WrittenChunk,
    as_written,
    check_written,
    checksums,
    chunks,
    clear,
    create,
    open_private,
    write_errors,
)
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.transport.mpi import MpiFile, MpiTransport

T = TypeVar("T")


@dataclass(frozen=True)
class WriteShare:
    """The parts of a rank's sources that it writes: its share."""

    sources: Sequence[Source]
    parts: Sequence[BoxPart]


class CollectiveSave:
    """Collective save in progress; created by all ranks, which then all call ``advance`` until it is ``done``.

    ``request`` is the file to write, on rank 0 only. ``expected`` contains the expected offsets of
    the model and optimizer datasets, on all ranks or on no rank. ``advance`` waits for this rank's
    writer; while the writer is ``busy``, the rank can do other work. ``offsets`` are those of the
    datasets, once they are known.
    """

    def __init__(
        self,
        comm: Communicator,
        writer: ShareWriter,
        share: WriteShare,
        request: WriteRequest | None,
        expected: Offsets | None = None,
    ) -> None:
        self._comm, self._writer, self._expected = comm, writer, expected
        self.done = False
        self.offsets: Offsets | None = None
        self._steps: Iterator[Callable[[], None]] = iter((self._write, self._finish, self._end))
        self._agreed(lambda: writer.stage(share))
        # The file exists before any rank opens it.
        self._agreed(lambda: create(request) if request is not None else None)
        self._target: Target = comm.broadcast_object(request.target if request is not None else None)
        if request is not None:
            writer.lay_out(request)
        if expected is not None:
            self._steps = iter((self._compare, self._end))
            if request is None:
                writer.write(self._target, expected)
            else:
                writer.write_as_laid_out(self._target)

    @property
    def busy(self) -> bool:
        """Return whether this rank's writer has not finished the current step."""
        return not self.done and self._writer.busy

    def advance(self) -> None:
        """Make the next step. Collective. If a rank failed, all ranks raise the same error."""
        next(self._steps)()

    def _write(self) -> None:
        offsets = self._agreed(lambda: self._writer.result() if self._is_rank_0 else None)
        self.offsets = self._comm.broadcast_object(offsets)
        assert self.offsets is not None
        self._writer.write(self._target, self.offsets)

    def _compare(self) -> None:
        """Compare the layout with the expected one; if it differs, write again. Then complete the file."""
        laid_out = self._agreed(lambda: self._writer.result() if self._is_rank_0 else None)
        expected = self._expected
        assert expected is not None
        differs = laid_out is not None and any(laid_out[name] != offset for name, offset in expected.items())
        self.offsets = self._comm.broadcast_object(laid_out if differs else None) or expected
        if self.offsets is not expected:
            self._agreed(self._writer.result, alike=False)
            self._agreed(lambda: clear(self._target) if self._is_rank_0 else None)
            self._writer.write(self._target, self.offsets)
        self._finish()

    def _finish(self) -> None:
        written = self._agreed(self._writer.result, alike=False)
        of_all_ranks = np.concatenate(self._comm.all_gather_object(written))
        if self._is_rank_0:
            self._writer.finish(of_all_ranks)

    def _end(self) -> None:
        self._agreed(lambda: self._writer.result() if self._is_rank_0 else None)
        self.done = True

    @property
    def _is_rank_0(self) -> bool:
        return self._comm.rank == 0

    def _agreed(self, action: Callable[[], T], *, alike: bool = True) -> T:
        """Run an action that may fail; if it fails on any rank, drop the checkpoint and raise on all ranks."""
        try:
            return agreed(self._comm, action, alike=alike)
        except BaseException:
            self.done = True
            self._writer.abort()
            raise


# Writers of a rank's share --------------------------------------------------------------------------------------------


class ShareWriter(Protocol):
    """Writer of a rank's share, one call after another; ``result`` completes the earliest call without a result.

    One checkpoint takes ``stage``, then ``lay_out`` on rank 0, ``write`` on all ranks, ``finish``
    on rank 0.
    """

    def stage(self, share: WriteShare) -> None:
        """Accept the data to write. A writer in another process copies it."""

    def lay_out(self, request: WriteRequest) -> None:
        """Start to make the layout; the result is the offset of each dataset."""

    def write(self, target: Target, offsets: Offsets) -> None:
        """Start to write the share; the result is the list of written byte ranges."""

    def write_as_laid_out(self, target: Target) -> None:
        """Start to write the share to the offsets of the preceding layout."""

    def finish(self, written: Written) -> None:
        """Start to complete and commit the file; it has its final name when the result is available."""

    @property
    def busy(self) -> bool:
        """Return whether a call that was started has not finished."""

    def result(self) -> Any:
        """Wait for the earliest call and return its result, or raise its error."""

    def abort(self) -> None:
        """Drop pending work and remove the private file."""

    def close(self) -> None:
        """Drop pending work and end the writer."""


class InlineWriter:
    """Inline writer: the rank itself does the work, within the call."""

    busy = False

    def __init__(self) -> None:
        self._file = FileWriter()
        self._share = WriteShare((), ())
        self._offsets: Offsets | None = None
        self._outcomes: deque[tuple[Any, Exception | None]] = deque()

    def stage(self, share: WriteShare) -> None:
        """Store the share without a copy."""
        self._share = share

    def lay_out(self, request: WriteRequest) -> None:
        """Make the layout of the file."""
        self._do(lambda: self._file.lay_out(request))
        self._offsets = self._outcomes[-1][0]

    def write(self, target: Target, offsets: Offsets) -> None:
        """Write the share."""
        self._do(lambda: self._file.write(target, chunks(self._share.sources, self._share.parts, offsets)))

    def write_as_laid_out(self, target: Target) -> None:
        """Write the share if a layout exists."""
        if self._offsets is not None:
            self.write(target, self._offsets)
        else:
            self._outcomes.append((None, None))

    def finish(self, written: Written) -> None:
        """Complete and commit the file."""
        self._do(lambda: self._file.finish(written))
        self._share = WriteShare((), ())

    def result(self) -> Any:
        """Return the result of the earliest call, or raise its error."""
        outcome, error = self._outcomes.popleft()
        if error is not None:
            raise error
        return outcome

    def abort(self) -> None:
        """Remove the private file."""
        self._share = WriteShare((), ())
        self._outcomes.clear()
        self._file.abort()

    def close(self) -> None:
        """Drop pending work."""
        self.abort()

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            self._outcomes.append((action(), None))
        except Exception as error:
            self._outcomes.append((None, error))


BATCH = 64 << 20  # bytes that a rank passes to MPI per call


class MpiIoWriter(InlineWriter):
    """Writer of all ranks together through MPI-IO, within the call like ``InlineWriter``."""

    def __init__(self, transport: MpiTransport, hints: Mapping[str, str]) -> None:
        super().__init__()
        self._transport, self._hints = transport, hints

    def write(self, target: Target, offsets: Offsets) -> None:
        """Write this rank's share. Collective: every rank completes the call, even if one of them has failed."""
        self._do(lambda: self._write(target, self._share, offsets))

    def _write(self, target: Target, share: WriteShare, offsets: Offsets) -> Written:
        with write_errors(target):
            size = max(self._transport.all_gather_object(end_of(share, offsets)))
            rows = self._write_batches(target, size, chunks(share.sources, share.parts, offsets))
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
