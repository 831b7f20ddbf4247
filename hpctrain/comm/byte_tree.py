"""Broadcast of a stream of bytes along a binary tree of ranks, over mpi4py alone: it needs neither torch nor NumPy.

Rank 0 reads the stream once. Every rank passes each piece on to at most two others while it receives the next ones, so
a piece arrives after as many messages as the tree has levels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

PIECE = 4 * 1024 * 1024  # bytes
IN_FLIGHT = 4  # pieces that are being sent to a child
READERS = 8  # threads that read a file
_PIECE, _END = 31, 32  # tags


class ByteTree:
    """Binary tree over the ranks of an mpi4py communicator; rank r passes on to the ranks 2r + 1 and 2r + 2."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        rank, size = comm.Get_rank(), comm.Get_size()
        self.parent = (rank - 1) // 2
        self.children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
        self.is_root = rank == 0
        self.sent = self.received = 0  # messages of this rank
        self._sending: deque[tuple[list[Any], Any]] = deque()  # requests, and the bytes that they read

    def broadcast(self, pieces: Iterable[bytes] | None, size: int = PIECE) -> Iterator[bytes | memoryview]:
        """Yield the pieces of rank 0, each of at most ``size`` bytes, on all ranks. Collective.

        Every rank must take all of them. An error of rank 0 while it reads is raised on all ranks, as ``OSError``.
        """
        failure: OSError | None = None
        if self.is_root:
            try:
                for piece in pieces or ():
                    self._pass_on(piece)
                    yield piece
            except OSError as error:
                failure = error
            reason = b"" if failure is None else str(failure).encode("utf-8", "replace")[:size]
        else:
            received, is_last = self._receive(size)
            while not is_last:
                self._pass_on(received)
                yield received
                received, is_last = self._receive(size)
            reason = bytes(received)
        self._pass_on(reason, _END)
        self._wait(0)
        if failure is not None:
            raise failure
        if reason:
            raise OSError(reason.decode("utf-8", "replace"))

    def _receive(self, size: int) -> tuple[memoryview, bool]:
        """Return the next message of the parent, and whether it is the last one: the error of rank 0, or empty."""
        from mpi4py import MPI

        buffer, status = bytearray(size), MPI.Status()
        self._comm.Recv([buffer, MPI.BYTE], self.parent, MPI.ANY_TAG, status)
        self.received += 1
        return memoryview(buffer)[: status.Get_count(MPI.BYTE)], status.Get_tag() == _END

    def _pass_on(self, piece: bytes | memoryview, tag: int = _PIECE) -> None:
        if not self.children:
            return
        from mpi4py import MPI

        requests = [self._comm.Isend([piece, MPI.BYTE], child, tag) for child in self.children]
        self.sent += len(requests)
        self._sending.append((requests, piece))
        self._wait(IN_FLIGHT)

    def _wait(self, most: int) -> None:
        """Wait until at most so many pieces are being sent."""
        from mpi4py import MPI

        while len(self._sending) > most:
            requests, _ = self._sending.popleft()
            MPI.Request.Waitall(requests)


def read_at(handle: int, size: int, offset: int) -> bytes:
    """Return the bytes of a file from an offset on, fewer at its end."""
    piece = os.pread(handle, size, offset)
    while len(piece) < size and (rest := os.pread(handle, size - len(piece), offset + len(piece))):
        piece += rest
    return piece


def pieces_of(path: str, size: int = PIECE, read: Callable[[int, int, int], bytes] = read_at) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces. Raises ``OSError``.

    Threads read the next pieces meanwhile: one request after the other leaves most of a file server's speed unused.
    """
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(READERS, "read") as threads:
        handle = file.fileno()
        offsets = iter(range(0, os.fstat(handle).st_size, size))
        reads = deque(threads.submit(read, handle, size, offset) for offset in islice(offsets, READERS))
        try:
            while reads and (piece := reads.popleft().result()):
                reads.extend(threads.submit(read, handle, size, offset) for offset in islice(offsets, 1))
                yield piece
        finally:
            for waiting in reads:
                waiting.cancel()
