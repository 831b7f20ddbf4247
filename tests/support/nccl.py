"""Fake of ``cupy.cuda.nccl``: the same calls, performed by MPI on host memory and recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

UNIQUE = tuple(range(-64, 64))
_SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 7: 4, 8: 8}


class FakeNccl:
    """NCCL of a process; messages of a group are sent together at its end, as in NCCL."""

    available = True

    def __init__(
        self, version: int = 22105, enqueue: Callable[[int, Callable[[], object]], None] | None = None
    ) -> None:
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.depth = 0
        self.messages: list[tuple[Any, ...]] = []
        self.comms: list[FakeComm] = []
        self._enqueue = enqueue

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> tuple[int, ...]:
        if self.failure:
            raise self.failure
        return UNIQUE

    def NcclCommunicator(self, size: int, unique: tuple[int, ...], rank: int) -> FakeComm:
        assert unique == UNIQUE, "rank 0's id has to reach everybody unchanged"
        self.comms.append(FakeComm(self, size, rank))
        return self.comms[-1]

    def groupStart(self) -> None:
        self.depth += 1

    def groupEnd(self) -> None:
        self.depth -= 1
        if not self.depth and self.messages:
            messages, self.messages = self.messages, []
            self.calls.append(("group", len(messages)))
            self.perform(messages[0][-1], lambda: messages[0][0].exchange(messages))

    def perform(self, stream: int, action: Callable[[], object]) -> None:
        """Perform a call now, or enqueue it on the fake streams."""
        if self._enqueue is not None:
            self._enqueue(stream, action)
        else:
            action()


class FakeComm:
    """One communicator, over a duplicate of the MPI world (without MPI for one rank)."""

    def __init__(self, library: FakeNccl, size: int, rank: int) -> None:
        self.library, self.size, self.rank = library, size, rank
        self.state = "alive"
        self.comm: Any = None
        if size > 1:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD.Dup()
            assert (self.comm.size, self.comm.rank) == (size, rank), "this fake knows whole worlds only"

    def allReduce(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        self._note("allReduce", count, kind, op)
        self._perform(stream, lambda: self._reduce(source, target, count, kind, op, None))

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        self._note("reduce", count, kind, op, root)
        self._perform(stream, lambda: self._reduce(source, target, count, kind, op, root))

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int, stream: int) -> None:
        self._note("broadcast", count, kind, root)

        def work() -> None:
            data = bytearray(_memory(source, count * _SIZES[kind]))
            if self.comm is not None:
                self.comm.Bcast([data, len(data), _mpi().BYTE], root)
            _memory(target, len(data))[:] = data

        self._perform(stream, work)

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        self._note("allGather", count, kind)

        def work() -> None:
            nbytes = count * _SIZES[kind]
            data = bytes(_memory(source, nbytes))
            parts = self.comm.allgather(data) if self.comm is not None else [data]
            _memory(target, nbytes * self.size)[:] = b"".join(parts)

        self._perform(stream, work)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("send", count, kind, peer)
        self._message(("send", address, count * _SIZES[kind], peer), stream)

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("recv", count, kind, peer)
        self._message(("recv", address, count * _SIZES[kind], peer), stream)

    def exchange(self, messages: list[tuple[Any, ...]]) -> None:
        """Exchange all messages of a group at the same time."""
        requests, own = [], [m for m in messages if m[1] == "send" and m[4] == self.rank]
        for _, what, address, nbytes, peer, _ in messages:
            if peer == self.rank:
                if what == "recv":
                    _memory(address, nbytes)[:] = bytes(_memory(own.pop(0)[2], nbytes))
            else:
                buffer = [_memory(address, nbytes), nbytes, _mpi().BYTE]
                requests.append((self.comm.Isend if what == "send" else self.comm.Irecv)(buffer, peer))
        if requests:
            _mpi().Request.Waitall(requests)

    def check_async_error(self) -> None:
        if self.library.failure:
            raise self.library.failure

    def abort(self) -> None:
        self.state = "aborted"

    def destroy(self) -> None:
        self.state = "destroyed"
        if self.comm is not None:
            self.comm.Free()

    def _message(self, message: tuple[Any, ...], stream: int) -> None:
        self.library.messages.append((self, *message, stream))
        if not self.library.depth:
            self.library.depth += 1
            self.library.groupEnd()

    def _note(self, name: str, *values: int) -> None:
        if self.library.failure:
            raise self.library.failure
        self.library.calls.append((name, *values))

    def _perform(self, stream: int, action: Callable[[], object]) -> None:
        self.library.perform(stream, action)

    def _reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int | None) -> None:
        import numpy as np

        dtype = {0: "i1", 1: "u1", 2: "i4", 4: "i8", 7: "f4", 8: "f8"}[kind]
        own = np.frombuffer(bytes(_memory(source, count * _SIZES[kind])), dtype)
        parts = self.comm.allgather(own) if self.comm is not None else [own]
        if root not in (None, self.rank):
            return
        total = parts[0]
        for part in parts[1:]:
            total = [np.add, np.multiply, np.maximum, np.minimum, np.add][op](total, part)
        if op == 4:
            total = total / np.dtype(dtype).type(self.size)
        _memory(target, total.nbytes)[:] = total.tobytes()


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def _memory(address: int, nbytes: int) -> memoryview:
    import ctypes

    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
