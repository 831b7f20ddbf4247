"""Liveness of ranks: heartbeats of a node's ranks in shared memory, and exit notices between all ranks.

Note: a page without dependencies. Each rank has a record in node memory that only this rank writes
and all ranks read. No function here sends a message or waits, so the page works while MPI hangs,
from any thread. Ranks of other nodes are not visible.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from hpctrain.comm.transport import reserve
from hpctrain.comm.transport.failures import is_rank_failure, suppress_rank_failures
from hpctrain.comm.transport.waiting import progress
from hpctrain.errors import RankFailedError

LINE = 128  # bytes per rank: two cache lines, because processors fetch lines in pairs
_CLAIM, _STACKS, _NAME = 0, 8, 40  # offsets in a record; between them are beat and since
_BEAT = struct.Struct("qq")
_BEAT_AT = 16
_NAME_BYTES = LINE - _NAME
STALE = 3.0  # seconds without a heartbeat after which a rank is stopped, or holds the GIL


@dataclass(frozen=True)
class HeartbeatRow:
    """Last heartbeat of one rank: it had waited ``waited`` seconds in ``operation`` (empty if it did not wait).

    ``ending``: it has claimed the end of the job.
    """

    rank: int
    operation: str
    waited: float
    silent: float  # seconds since the heartbeat
    ending: bool = False

    @property
    def late(self) -> bool:
        """Return whether others may be waiting for this rank."""
        return not self.operation or self.silent > STALE

    def __str__(self) -> str:
        if self.silent > STALE:
            return f"rank {self.rank} has not responded for {self.silent:.0f} s"
        if not self.operation:
            return f"rank {self.rank} is in no collective"
        return f"rank {self.rank} waits in {self.operation}"


class Heartbeat:
    """Heartbeat page of the ranks of this node. Construction is collective over ``comm``.

    Raises ``NoSpaceError`` on all ranks of a node that has no space for it in /dev/shm.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._node = node = reserve.node_of(comm)
        self._own_index = node.Get_rank()
        self._ranks: list[int] = node.allgather(comm.Get_rank())
        self._window = reserve.reserve_window(node, LINE, lambda here: node.allreduce(here, MPI.LAND))
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(node.Get_size())]
        self._records = [memoryview(record) for record in memory]
        self._records[self._own_index][:] = bytes(LINE)
        self.beat("", 0.0)
        node.Barrier()

    def claim(self, seconds: float) -> bool:
        """Return whether this rank is the first of its node to claim the end of the job; block for ``seconds``."""
        stamp = time.monotonic_ns()  # one clock for all processes of a node
        self._put(_CLAIM, stamp)
        time.sleep(seconds)
        claims = [(self._get(rank, _CLAIM), rank) for rank in range(len(self._records))]
        return min(each for each in claims if each[0]) == (stamp, self._own_index)

    def beat(self, operation: str, waited: float) -> None:
        """Publish a heartbeat: this rank is alive, and has waited this long in this operation."""
        now = time.monotonic_ns()
        record = self._records[self._own_index]
        _BEAT.pack_into(record, _BEAT_AT, now, now - int(waited * 1e9))
        record[_NAME:] = operation.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")

    def read_all(self) -> list[HeartbeatRow]:
        """Return the last heartbeats of this node's ranks, in rank order."""
        now, found = time.monotonic_ns(), []
        for index, (rank, record) in enumerate(zip(self._ranks, self._records)):
            beat, since = _BEAT.unpack_from(record, _BEAT_AT)
            operation = bytes(record[_NAME:]).partition(b"\0")[0].decode(errors="replace")
            ending = self._get(index, _CLAIM) != 0
            found.append(HeartbeatRow(rank, operation, (beat - since) / 1e9, (now - beat) / 1e9, ending))
        return found

    def request_stacks(self) -> None:
        """Ask all ranks of this node to print the stacks of their threads."""
        self._put(_STACKS, 1)

    def stacks_requested(self) -> bool:
        """Return whether any rank of this node has asked for stacks."""
        return any(self._get(rank, _STACKS) for rank in range(len(self._records)))

    def _put(self, offset: int, value: int) -> None:
        struct.pack_into("q", self._records[self._own_index], offset, value)

    def _get(self, rank: int, offset: int) -> int:
        value: int = struct.unpack_from("q", self._records[rank], offset)[0]
        return value


# Exit notices between ranks, on a separate communicator ---------------------------------------------------------------


_LEFT, _END = 0, 1  # tags of messages: this rank has left, this rank ends the job
_CODE = struct.Struct("i")  # exit code in a message
GRACE = 1.0  # seconds within which all ranks of a regular job reach its end


class ExitNotifier:
    """Exit notifier with its own communicator.

    Construction is collective over ``comm``. It needs MPI with THREAD_MULTIPLE: notices are read
    from a second thread.
    """

    def __init__(self, comm: MPI.Intracomm, grace: float = GRACE) -> None:
        self._comm, self._grace = comm.Dup(), grace
        self._ranks_left: set[int] = set()
        self._notified = False
        self._sent: list[bytes] = []

    def leave(self) -> None:
        """Return when all ranks leave; if that takes longer than ``grace``, notify the others first.

        Meanwhile, serve ranks that still access memory of this rank. Raises ``RankFailedError`` if
        another rank has died before its end.
        """
        try:
            self._await_all()
        except MPI.Exception as error:
            if not is_rank_failure(error):
                raise
            raise RankFailedError("another rank has died before its end") from error

    def _await_all(self) -> None:
        barrier = self._comm.Ibarrier()
        deadline = time.monotonic() + self._grace
        while not barrier.Test():
            progress()
            if not self._notified and time.monotonic() > deadline:
                self._notify()
            time.sleep(0.001)

    def ranks_that_left(self) -> list[int]:
        """Return the ranks whose exit notice has arrived, in order."""
        status = MPI.Status()
        with suppress_rank_failures():
            while self._comm.Iprobe(MPI.ANY_SOURCE, _LEFT, status):
                source = status.Get_source()
                self._comm.Recv([bytearray(_CODE.size), MPI.BYTE], source, _LEFT)
                self._ranks_left.add(source)
        return sorted(self._ranks_left)

    def end_others(self, code: int) -> None:
        """Tell the other ranks that this rank ends the job with an exit code."""
        self._send(_END, code)

    def rank_that_ends(self) -> tuple[int, int] | None:
        """Return a rank that has told that it ends the job, and the exit code; None if there is none."""
        status, code = MPI.Status(), bytearray(_CODE.size)
        sources: Iterable[int] = (MPI.ANY_SOURCE,)
        try:
            self._comm.Iprobe(MPI.ANY_SOURCE, _END)
        except MPI.Exception as error:  # a rank has died: no message is found that way
            if not is_rank_failure(error):
                raise
            sources = range(self._comm.Get_size())
        for source in sources:
            with suppress_rank_failures():
                if self._comm.Iprobe(source, _END, status):
                    self._comm.Recv([code, MPI.BYTE], status.Get_source(), _END)
                    return status.Get_source(), _CODE.unpack(code)[0]
        return None

    def _notify(self) -> None:
        self._notified = True
        self._send(_LEFT)

    def _send(self, tag: int, code: int = 0) -> None:
        notice = _CODE.pack(code)
        self._sent.append(notice)  # it must live until it has been sent
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                with suppress_rank_failures():
                    self._comm.Isend([notice, MPI.BYTE], rank, tag).Free()
