"""Writer of a checkpoint file: bytes at their offsets, checked, then committed under the file's name.

Everything here works on memory and a file descriptor, in any process: a rank, or the writer process
next to it, which has neither torch nor MPI.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.chunks import as_written, write_chunks
from hpctrain.checkpoint.format.direct import LEAST, allocate, direct_file
from hpctrain.checkpoint.format.draft import Draft
from hpctrain.checkpoint.format.layout import Groups, Written
from hpctrain.checkpoint.format.plan import (
    FileChunk,
    Offsets,
    Source,
    Target,
    WriteRequest,
    WriteShare,
    described,
    nbytes_of,
    plan,
)
from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.errors import CheckpointError, CheckpointFaultError, HpctrainError
from hpctrain.util import atomic
from hpctrain.util.retry import NO_SPACE, TRANSIENT, free_bytes, retries

# One file, from its layout to its commit ------------------------------------------------------------------------------
#
# Note: layout first, bytes second. A ``Draft`` returns the offset of each dataset. Then structure and
# bytes are written with ``pwrite``, at the speed of the disk and without HDF5's global lock. The
# result is a plain HDF5 file.
#
# Note: the commit. The file is written under a private name in the folder of its target. The written
# bytes are checked (``write_chunks``), and flushed to the disk. Only then is the file renamed, and the
# folder flushed. After any error the private file is removed, and is never renamed to the target.
# Every checkpoint takes this path: a rank's, a writer process's, and an imported one.


class FileWriter:
    """File writer: one process's part of one checkpoint at a time, past the page cache where possible.

    ``private``: the memory of the tensors does not change, so that the disk can read it.

    Every error is raised as the ``CheckpointError`` to show: the path, the reason, and the missing
    space if the disk is full.
    """

    def __init__(self, *, private: bool = False) -> None:
        self._private = private
        self._draft: Draft | None = None
        self._request: WriteRequest | None = None
        self._offsets: Offsets | None = None

    def lay_out(self, request: WriteRequest, expected: Offsets | None = None) -> Offsets:
        """Return the offset of each dataset in the file; for rank 0. Blocks for ``expected`` offsets are allocated."""
        self._request, self._offsets = request, None
        if expected is not None:
            reserve(request, expected)
        with write_errors(request.target):
            self._draft = Draft(request)
        self._offsets = {dataset.name: offset for dataset, offset in zip(request.datasets, self._draft.offsets)}
        return self._offsets

    def write(
        self, target: Target, chunks: Callable[[Offsets], Iterable[FileChunk]], offsets: Offsets | None = None
    ) -> Written:
        """Write a share into the private file, verify and flush it; return the written byte ranges.

        Without ``offsets``, those of the preceding layout are used; if that has failed, nothing is
        written.
        """
        offsets = self._offsets if offsets is None else offsets
        if offsets is None:
            return as_written(())
        with write_errors(target), open_private(target) as handle, direct_file(handle, self._private) as direct:
            rows = write_chunks(handle, chunks(offsets), direct)
            if direct is not None:
                direct.sync()
            os.fsync(handle)  # too: only the descriptor that wrote reports failures
        return as_written(rows)

    def finish(self, written: Written, *, verify: bool = False) -> None:
        """Complete and commit the file, given all written byte ranges; for rank 0.

        ``verify`` reads the whole file as a reader does before it is renamed.
        """
        request, draft = self._request, self._draft
        assert request is not None and draft is not None
        target = request.target
        with write_errors(target):
            with open_private(target) as handle:
                parts = draft.finish(written)
                os.ftruncate(handle, draft.size)
                what = "the structure of the file"
                write_chunks(handle, (FileChunk(offset, memoryview(part), what) for offset, part in parts))
                os.fsync(handle)
            if verify:
                verify_file(target.private)
        if request.claim is not None:
            request.claim.check()
        with write_errors(target):
            atomic.put(target.private, target.path)
        self._draft = self._request = None
        _flush_folder(target.path)

    def abort(self) -> None:
        """Drop the current checkpoint and remove its private file."""
        if self._draft is not None:
            self._draft.close()
        if self._request is not None:
            atomic.discard(self._request.target.private)
        self._draft = self._request = None


class ShareWriter:
    """Writer of a rank's share; the rank itself does the work, within the call.

    Calls are made one after another, and ``result`` completes the earliest call without a result.
    One checkpoint takes ``stage``, then ``create`` and ``lay_out`` on rank 0, ``write`` on all ranks,
    ``finish`` on rank 0.
    """

    def __init__(self) -> None:
        self._file = FileWriter()
        self._share = WriteShare()
        self._outcomes: deque[tuple[Any, Exception | None]] = deque()

    def stage(self, share: WriteShare) -> None:
        """Accept the data to write; they are not copied."""
        self._share = share

    def create(self, request: WriteRequest, expected: Offsets | None) -> None:
        """Create the private file, with blocks for the expected offsets of the tensors, if they are known."""
        create(request, expected)

    def lay_out(self, request: WriteRequest) -> None:
        """Make the layout; the result is the offset of each dataset."""
        self._start(self._file.lay_out, request)

    def write(self, target: Target, offsets: Offsets | None = None) -> None:
        """Write the share, by default as laid out; the result is the list of written byte ranges."""
        self._start(self._file.write, target, self._share.chunks, offsets)

    def finish(self, written: Written) -> None:
        """Complete and commit the file; it has its final name when the result is available."""
        self._start(self._file.finish, written)
        self._share = WriteShare()

    @property
    def busy(self) -> bool:
        """Return whether a call has not finished."""
        return False

    def result(self) -> Any:
        """Wait for the earliest call and return its result, or raise its error."""
        outcome, error = self._outcomes.popleft()
        if error is not None:
            raise error
        return outcome

    def abort(self) -> None:
        """Drop pending work and remove the private file."""
        self._share = WriteShare()
        self._outcomes.clear()
        self._file.abort()

    def close(self) -> None:
        """Drop pending work and end the writer."""
        self.abort()

    def _start(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._outcomes.append((call(*arguments), None))
        except Exception as error:
            self._outcomes.append((None, error))


def write_file(
    path: Path,
    sources: Iterable[Source],
    groups: Groups,
    alignment: int = layout.ALIGNMENT,
    *,
    verify: bool = True,
) -> None:
    """Write and commit a file of tensors and of groups with their attributes (``"/"`` is the root), from one process.

    The groups above a dataset are created implicitly. The bytes of the tensors must not change
    during the call. ``verify`` reads the whole file as a reader does before it is committed. Raises
    ``CheckpointError`` with the reason; a previous file at ``path`` then still exists.
    """
    sources = list(sources)
    boxes = [described(source) for source in sources]
    attributes = {source.path: source.attributes for source in sources}
    target, writer = Target.of(path, boxes), FileWriter()
    try:
        with write_errors(target):
            shares = plan([boxes], alignment)
        request = WriteRequest(target, shares.datasets, groups, attributes, alignment)
        create(request, writer.lay_out(request))
        writer.finish(writer.write(target, WriteShare(sources, shares.parts[0]).chunks), verify=verify)
    except BaseException:
        writer.abort()
        raise


def create(request: WriteRequest, offsets: Offsets | None = None) -> None:
    """Create the folder of a checkpoint and the private file, with blocks for known ``offsets``; for rank 0."""
    target = request.target
    with write_errors(target):
        retries.call(lambda: target.path.parent.mkdir(parents=True, exist_ok=True))
        if request.create:
            handle = atomic.create(target.private)
            try:
                if offsets is not None:
                    allocate(handle, _large(request, offsets))
            except OSError:
                atomic.discard(target.private)
                raise
            finally:
                os.close(handle)


def reserve(request: WriteRequest, offsets: Offsets) -> None:
    """Allocate the blocks of the large tensors of a private file; for rank 0, before any rank writes."""
    if request.create:
        with write_errors(request.target), open_private(request.target) as handle:
            allocate(handle, _large(request, offsets))


def _large(request: WriteRequest, offsets: Offsets) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the datasets that can be written directly."""
    for dataset in request.datasets:
        offset, nbytes = offsets.get(dataset.name), nbytes_of(dataset)
        if offset is not None and nbytes >= LEAST:
            yield offset, nbytes


def clear(target: Target) -> None:
    """Discard the contents of the private file; for rank 0."""
    with write_errors(target), open_private(target) as handle:
        os.ftruncate(handle, 0)


@contextmanager
def open_private(target: Target) -> Iterator[int]:
    """Open the file that is being written, for reading and writing."""
    try:
        handle = atomic.reopen(target.private)
    except FileNotFoundError:
        raise CheckpointError(
            "this rank does not see the file that rank 0 has made: the folder must be the same on all ranks, "
            "on a filesystem that they share"
        ) from None
    try:
        yield handle
    finally:
        os.close(handle)


def _flush_folder(path: Path) -> None:
    """Make the rename durable. The new file is complete under its name by now, even if this raises."""
    try:
        retries.call(atomic.flush_folder, path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written and verified, but its folder could not be flushed ({error.strerror}): "
            "it may be gone after a power failure"
        ) from error


@contextmanager
def write_errors(target: Target) -> Iterator[None]:
    """Convert any error of the filesystem to the one that names the checkpoint and the reason."""
    try:
        yield
    except Exception as error:
        raise _write_error(error, target) from error


def _write_error(error: Exception, target: Target) -> Exception:
    """Return the ``CheckpointError`` with the reason why a file cannot be written.

    The bytes of the private file count as free, because it is about to be removed.
    """
    path, number = target.path, error.errno if isinstance(error, OSError) else None
    if isinstance(error, HpctrainError) and number is None:
        if not isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"cannot write {path}: {error}")
    reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    if number in NO_SPACE:
        free, taken = free_bytes(path.parent), 0
        with suppress(OSError):
            taken = target.private.stat().st_blocks * 512
        available = "an unknown number of" if free is None else str(free + taken)
        reason += f": {target.nbytes} bytes are needed, {available} bytes are free in {path.parent}"
    kind = CheckpointFaultError if number in TRANSIENT else CheckpointError
    return kind(f"cannot write {path}: {reason.lower() if number else reason}")
