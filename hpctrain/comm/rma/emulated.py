"""Remote memory over messages, for MPI libraries whose one-sided operations are broken or slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.rma.remote_memory import Operation, RemoteMemory, RowOperation
from hpctrain.comm.transport.mpi_calls import memory
from hpctrain.comm.transport.shared_counters import Counters, SharedParts
from hpctrain.comm.transport.waiting import SPINS, call_in_waits, timeout_seconds, until, waiting

# Remote memory over messages, for MPI libraries whose one-sided operations are broken or slow -------------------------
#
# Note: the protocol. A request is an array of integers (operation, first element or counter, number
# of elements, amount, tag of the answer). Elements to write or add follow as a second message. For
# rows of a matrix, a list of row indices precedes them, whose length is ``amount``.
#
# Owners serve requests whenever they call ``progress``, and so do ranks that wait for an answer.
# Therefore two ranks that request from each other both proceed. Every request is answered, so that
# its completion is known. Within a node memory is accessed directly. A waiting rank serves all
# memories that its process exposes, because a rank that waits for it may wait at another memory.


_CODES = ("get", "put", "add", "count", "get_rows", "put_rows", "add_rows")
_REQUEST, _ELEMENTS, _ANSWER = 1, 2, 3  # tags; the last is the first of many
_ANSWERS = 1000
_FIELDS = 5
_DONE = torch.zeros(1, dtype=torch.uint8)

_LIVE: list[RemoteMemoryByMessages] = []


def serve() -> None:
    """Serve the pending requests for all memories that this process exposes."""
    for one in list(_LIVE):
        one.serve_own()


def release(comm: MPI.Intracomm) -> None:
    """Free the windows of all memories that still exist; their tensors stay valid, requests end. Collective.

    Called at process exit if ``free`` was not called: UCX warns about windows that it finds in
    MPI_Finalize. If the ranks hold different numbers of memories, after an error, all windows are
    left to MPI.
    """
    if len(set(comm.allgather(len(_LIVE)))) == 1:
        for one in _LIVE:
            one.release()
        _LIVE.clear()


class RemoteMemoryByMessages(RemoteMemory):
    """Remote memory that its owner serves. Construction and release are collective."""

    name = "messages"

    def __init__(self, comm: MPI.Intracomm, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        self._comm = comm.Dup()
        self.rank, self.lengths, self.dtype = comm.rank, list(lengths), dtype
        self._pieces = SharedParts(self._comm, lengths, dtype)
        self._places = {rank: place for place, rank in enumerate(self._pieces.views)}
        self._counters = Counters(self._pieces.node, words + 1)
        self._arrivals, self._meetings = words, 0  # last counter: number of barriers that a rank has reached
        _LIVE.append(self)
        call_in_waits(serve)
        self._sent: list[tuple[MPI.Request, object]] = []  # answers in transit, and the buffers that they use
        self._numbers = count()
        self._comm.Barrier()

    def view(self, rank: int) -> Tensor | None:
        """Return a rank's memory if it is on this node."""
        return self._pieces.views.get(rank)

    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        """Atomically add to a counter of a rank, and return its previous value."""
        if rank in self._places:
            return self._counters.fetch_add(self._places[rank], word, amount)
        before = torch.zeros(1, dtype=torch.int64)
        self._ask("count", rank, word, before, amount)
        return int(before)

    def _carry(self, operation: Operation, rank: int, values: Tensor, start: int) -> None:
        self._ask(operation, rank, start, values)

    def _carry_rows(self, operation: RowOperation, rank: int, values: Tensor, rows: Tensor, start: int) -> None:
        self._ask(operation, rank, start, values, rows.numel(), rows.contiguous())

    # Requests ---------------------------------------------------------------------------------------------------------

    def _ask(
        self, what: str, rank: int, start: int, values: Tensor, amount: int = 0, rows: Tensor | None = None
    ) -> None:
        """Send a request, and serve others until it is answered."""
        if self.recorder is not None:
            self.recorder.count(what, values.nbytes)
        tag = _ANSWER + next(self._numbers) % _ANSWERS
        request = np.array([_CODES.index(what), start, values.numel(), amount, tag], dtype=np.int64)
        answered = what in ("get", "count", "get_rows")
        room = memory(values) if answered else bytearray(1)
        pending = [self._comm.Irecv([room, MPI.BYTE], rank, tag), self._comm.Isend(request, rank, _REQUEST)]
        if rows is not None:
            pending.append(self._comm.Isend([memory(rows), MPI.BYTE], rank, _ELEMENTS))
        if not answered:
            pending.append(self._comm.Isend([memory(values), MPI.BYTE], rank, _ELEMENTS))
        operation = f"{what} in rank {rank}'s memory"
        with waiting(operation):
            until(lambda: self._done(pending), operation, lambda: _late(operation, rank), SPINS, period=1)

    def _done(self, pending: list[MPI.Request]) -> bool:
        self.progress()
        return bool(MPI.Request.Testall(pending))

    # Service of requests ----------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Serve the pending requests for all memories that this process exposes."""
        serve()

    def serve_own(self) -> None:
        """Serve the pending requests for this memory."""
        if len(self._places) == len(self.lengths):
            return  # all ranks are on this node
        self._sent = [(request, made_of) for request, made_of in self._sent if not request.Test()]
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            self._serve(status.Get_source())

    def _serve(self, source: int) -> None:
        fields = np.zeros(_FIELDS, dtype=np.int64)
        self._comm.Recv(fields, source, _REQUEST)
        code, start, numel, amount, tag = map(int, fields)
        what = _CODES[code]
        if what == "count":
            answer = torch.tensor([self.fetch_add(self.rank, start, amount)])
        elif what == "get":
            answer = self._pieces.own[start : start + numel].clone()  # a snapshot
        elif what.endswith("_rows"):
            answer = self._serve_rows(what, source, start, (amount, numel // amount))
        else:
            values = self._elements(source, (numel,))
            own = self._pieces.own[start : start + numel]
            own.copy_(values) if what == "put" else own.add_(values)
            answer = _DONE
        self._sent.append((self._comm.Isend([memory(answer), MPI.BYTE], source, tag), answer))

    def _serve_rows(self, what: str, source: int, start: int, shape: tuple[int, int]) -> Tensor:
        rows = self._elements(source, shape[:1], torch.int64)
        values = torch.empty(shape, dtype=self.dtype) if what == "get_rows" else self._elements(source, shape)
        serve = {"get_rows": self.get_rows, "put_rows": self.put_rows, "add_rows": self.add_rows}[what]
        serve(self.rank, values, rows, start)
        return values if what == "get_rows" else _DONE

    def _elements(self, source: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Receive the elements that follow a request."""
        values = torch.empty(shape, dtype=dtype or self.dtype)
        self._comm.Recv([memory(values), MPI.BYTE], source, _ELEMENTS)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, and serve them meanwhile. Collective."""
        self._meetings += 1
        self.fetch_add(self.rank, self._arrivals, 1)
        meeting = [self._comm.Ibarrier()]
        operation = "a barrier of all workers"
        with waiting(operation):
            until(lambda: self._done(meeting), operation, lambda: self._absent(operation), SPINS, period=1)

    def _absent(self, operation: str) -> str:
        """Return a text about the missing ranks of this node; the state of other nodes is not known here."""
        absent = [rank for rank in self._places if self.fetch_add(rank, self._arrivals) < self._meetings]
        who = f"ranks {absent} have not arrived" if absent else "some ranks of other nodes have not arrived"
        return f"{operation}: {who} within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"

    def free(self) -> None:
        """Serve requests until all ranks have reached this call, then free the memory. Collective."""
        if self not in _LIVE:
            return  # the process is exiting
        self.barrier()
        for request, _ in self._sent:
            request.Wait()
        self._give_back()

    def release(self) -> None:
        """Free the window of the counters; the memory stays valid. Collective."""
        self._counters.free()

    def _give_back(self) -> None:
        _LIVE.remove(self)
        self._counters.free()
        self._pieces.free()
        self._comm.Free()


def _late(operation: str, rank: int) -> str:
    return f"{operation}: rank {rank} did not answer within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"
