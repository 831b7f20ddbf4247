"""Remote memory over MPI: by one-sided operations, or by messages if a library's are broken or slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.rma.remote_memory import OPERATIONS, RemoteMemory
from hpctrain.comm.transport import reserve
from hpctrain.comm.transport.failures import all_complete
from hpctrain.comm.transport.mpi import DTYPES, in_elements, memory
from hpctrain.comm.transport.waiting import SPINS, register_progress, timeout_seconds, until, waiting

# Protocol -------------------------------------------------------------------------------------------------------------
#
# Note: the protocol. A request is an array of integers (operation, first element or counter, number
# of elements, amount, tag of the answer). Elements to write or add follow as a second message. For
# rows of a matrix, a list of row indices precedes them, whose length is ``amount``.
#
# Owners serve requests whenever they call ``progress``, and so do ranks that wait for an answer.
# Therefore two ranks that request from each other both proceed. Every request is answered, so that
# its completion is known. Within a node memory is accessed directly. A waiting rank serves all
# memories that its process exposes, because a rank that waits for it may wait at another memory.


_CODES = (*OPERATIONS, "count")
_REQUEST, _ELEMENTS, _ANSWER = 1, 2, 3  # tags; the last is the first of many
_ANSWERS = 1000
_FIELDS = 5
_DONE = torch.zeros(1, dtype=torch.uint8)
PAGE = 4096

_EXISTING: list[RemoteMemoryByMessages] = []


def serve() -> None:
    """Serve the pending requests for all memories that this process exposes."""
    for one in list(_EXISTING):
        one.serve_own()


def release(comm: MPI.Intracomm) -> None:
    """Free the windows of all memories that still exist; their tensors stay valid, requests end. Collective.

    Called at process exit if ``free`` was not called: UCX warns about windows that it finds in
    MPI_Finalize. If the ranks hold different numbers of memories, after an error, all windows are
    left to MPI.
    """
    if len(set(comm.allgather(len(_EXISTING)))) == 1:
        for one in _EXISTING:
            one.release()
        _EXISTING.clear()


class RemoteMemoryByMessages(RemoteMemory):
    """Remote memory that its owner serves. Construction and release are collective."""

    name = "messages"

    def __init__(self, comm: MPI.Intracomm, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        self._comm = comm.Dup()
        self.rank, self.lengths, self.dtype = comm.rank, list(lengths), dtype
        self._node = reserve.node_of(self._comm)
        nbytes = -(-max(lengths[self.rank] * dtype.itemsize, 1) // PAGE) * PAGE
        agree: Callable[[bool], bool] = lambda here: self._comm.allreduce(here, MPI.LAND)
        self._segments = reserve.reserve_window(self._node, nbytes, agree)
        self._views: dict[int, Tensor] = {}  # segments of the ranks of this node, mapped by all of them
        for place, rank in enumerate(self._node.allgather(self.rank)):
            segment, _ = self._segments.Shared_query(place)
            self._views[rank] = torch.frombuffer(segment, dtype=dtype, count=max(lengths[rank], 1))[: lengths[rank]]
        self._views[self.rank].zero_()
        self._node.Barrier()
        self._node_ranks = {rank: place for place, rank in enumerate(self._views)}
        self._counters = Counters(self._node, words + 1)
        self._barrier_word, self._barriers = words, 0  # last counter: number of barriers that a rank has reached
        _EXISTING.append(self)
        register_progress(serve)
        self._answers_in_transit: list[tuple[MPI.Request, object]] = []  # and the buffers that they use
        self._tags = count()
        self._comm.Barrier()

    def view(self, rank: int) -> Tensor | None:
        return self._views.get(rank)

    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        if rank in self._node_ranks:
            return self._counters.fetch_add(self._node_ranks[rank], word, amount)
        before = torch.zeros(1, dtype=torch.int64)
        self._carry("count", rank, before, word, amount=amount)
        return int(before)

    # Requests ---------------------------------------------------------------------------------------------------------

    def _carry(
        self, what: str, rank: int, values: Tensor, start: int, rows: Tensor | None = None, amount: int = 0
    ) -> None:
        """Send a request, and serve others until it is answered."""
        if self.recorder is not None:
            self.recorder.count(what, values.nbytes)
        tag = _ANSWER + next(self._tags) % _ANSWERS
        amount = amount if rows is None else rows.numel()
        request = np.array([_CODES.index(what), start, values.numel(), amount, tag], dtype=np.int64)
        has_answer = what in ("get", "get_rows", "count")
        answer = memory(values) if has_answer else bytearray(1)
        pending = [self._comm.Irecv([answer, MPI.BYTE], rank, tag), self._comm.Isend(request, rank, _REQUEST)]
        if rows is not None:
            rows = rows.contiguous()
            pending.append(self._comm.Isend([memory(rows), MPI.BYTE], rank, _ELEMENTS))
        if not has_answer:
            pending.append(self._comm.Isend([memory(values), MPI.BYTE], rank, _ELEMENTS))
        operation = f"{what} in rank {rank}'s memory"
        with waiting(operation):
            until(lambda: self._done(pending), operation, lambda: _timeout_message(operation, rank), SPINS, period=1)

    def _done(self, pending: list[MPI.Request]) -> bool:
        self.progress()
        return all_complete(MPI.Request.Testall, pending)

    # Service of requests ----------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Serve the pending requests for all memories that this process exposes."""
        serve()

    def serve_own(self) -> None:
        """Serve the pending requests for this memory."""
        if len(self._node_ranks) == len(self.lengths):
            return  # all ranks are on this node
        self._answers_in_transit = [
            (request, buffer) for request, buffer in self._answers_in_transit if not request.Test()
        ]
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
        else:
            rows = self._elements(source, (amount,), torch.int64) if what.endswith("_rows") else None
            shape = (numel,) if rows is None else (amount, numel // amount)
            reads = what.startswith("get")
            values = torch.empty(shape, dtype=self.dtype) if reads else self._elements(source, shape, self.dtype)
            self._access(what, self.rank, values, start, rows)
            answer = values if reads else _DONE
        self._answers_in_transit.append((self._comm.Isend([memory(answer), MPI.BYTE], source, tag), answer))

    def _elements(self, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive the elements that follow a request."""
        values = torch.empty(shape, dtype=dtype)
        self._comm.Recv([memory(values), MPI.BYTE], source, _ELEMENTS)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, and serve them meanwhile. Collective."""
        self._barriers += 1
        self.fetch_add(self.rank, self._barrier_word, 1)
        pending = [self._comm.Ibarrier()]
        operation = "a barrier of all workers"
        with waiting(operation):
            until(lambda: self._done(pending), operation, lambda: self._missing_ranks(operation), SPINS, period=1)

    def _missing_ranks(self, operation: str) -> str:
        """Return a text about the missing ranks of this node; the state of other nodes is not known here."""
        missing = [rank for rank in self._node_ranks if self.fetch_add(rank, self._barrier_word) < self._barriers]
        who = f"ranks {missing} have not arrived" if missing else "some ranks of other nodes have not arrived"
        return f"{operation}: {who} within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"

    def free(self) -> None:
        """Serve requests until all ranks have reached this call, then free the memory. Collective."""
        if self not in _EXISTING:
            return  # the process is exiting
        self.barrier()
        for request, _ in self._answers_in_transit:
            request.Wait()
        self._free_all()

    def release(self) -> None:
        """Free the window of the counters; the memory stays valid. Collective."""
        self._counters.free()

    def _free_all(self) -> None:
        _EXISTING.remove(self)
        self._counters.free()
        self._views.clear()
        self._segments.Free()
        self._node.Free()
        self._comm.Free()


def _timeout_message(operation: str, rank: int) -> str:
    return f"{operation}: rank {rank} did not answer within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"


class Counters:
    """Atomic counters of each rank of a node, which any rank of the node can change without the owner's help."""

    def __init__(self, node: MPI.Intracomm, words: int) -> None:
        self._window = MPI.Win.Allocate(8 * max(words, 1), 8, comm=node)
        torch.frombuffer(self._window.tomemory(), dtype=torch.int64).zero_()
        node.Barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def fetch_add(self, rank: int, word: int, amount: int) -> int:
        """Atomically add to a counter of a rank of the node, and return its previous value."""
        given, before = np.array([amount], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._window.Fetch_and_op(given, before, rank, word, MPI.SUM if amount else MPI.NO_OP)
        self._window.Flush(rank)
        return int(before[0])

    def free(self) -> None:
        """Free the counters. Collective."""
        self._window.Unlock_all()
        self._window.Free()


# One-sided operations, and a self-test of them on known data, made before they are used -------------------------------
#
# Note: operations that are not one-sided. Within a node memory is accessed directly, as in
# ``RemoteMemoryByMessages``. The shared memory of a node is exposed to other nodes by a window over all
# ranks, for reading, writing and adding elements.
#
# Counters of other nodes are still accessed by messages. They must be atomic with respect to the
# owner's neighbours, which only the owner can ensure: with a window over several nodes, Open MPI
# would make neighbours wait for the owner, too.
#
# Rows of a matrix are read and written as one operation, with a derived datatype. This took a sixth
# of the time of one operation per row. Rows are added by a message: for 256 rows Open MPI took 250 ms
# to accumulate them with a derived datatype, and 40 ms by the message.


class RemoteMemoryByRma(RemoteMemoryByMessages):
    """Remote memory in MPI windows. Construction and release are collective."""

    name = "one-sided MPI"

    def __init__(self, comm: MPI.Intracomm, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        super().__init__(comm, lengths, dtype, words)
        self._window = MPI.WIN_NULL
        if any(self._comm.allgather(len(self._node_ranks) < comm.size)):
            own = self._views[self.rank]
            memory = MPI.buffer.fromaddress(own.data_ptr(), own.nbytes)
            self._window = MPI.Win.Create(memory, dtype.itemsize, comm=self._comm)
            self._window.Lock_all(MPI.MODE_NOCHECK)

    def _carry(
        self, what: str, rank: int, values: Tensor, start: int, rows: Tensor | None = None, amount: int = 0
    ) -> None:
        if what in ("add_rows", "count"):
            super()._carry(what, rank, values, start, rows, amount)
            return
        if self.recorder is not None:
            self.recorder.count(what, values.nbytes)
        kind, reads = DTYPES[self.dtype], what.startswith("get")
        with waiting(f"{what} in rank {rank}'s memory"):
            if rows is not None:
                indexed = kind.Create_indexed_block(values.shape[1], (rows * values.shape[1]).tolist()).Commit()
                carry = self._window.Get if reads else self._window.Put
                carry((memory(values), values.numel(), kind), rank, (start, 1, indexed))
                self._window.Flush(rank)
                indexed.Free()
                return
            for spec in in_elements(values):
                target = (start, spec[1], kind)
                if what == "add":
                    self._window.Accumulate(spec, rank, target, MPI.SUM)
                elif reads:
                    self._window.Get(spec, rank, target)
                else:
                    self._window.Put(spec, rank, target)
                start += spec[1]
            self._window.Flush(rank)

    def release(self) -> None:
        """Free the windows of elements and counters; the memory stays valid. Collective."""
        self._free_window()
        super().release()

    def _free_window(self) -> None:
        if self._window != MPI.WIN_NULL:
            self._window.Unlock_all()
            self._window.Free()

    def _free_all(self) -> None:
        self._free_window()
        super()._free_all()


LENGTH = 1000  # elements per rank


def self_test(comm: MPI.Intracomm, memory: type[RemoteMemoryByRma] = RemoteMemoryByRma) -> str:
    """Return a description of a failure; empty if the test passes. Collective.

    Each rank writes and adds to the memory of the rank farthest from it, and reads it back. All
    ranks add to one counter.
    """
    try:
        remote = memory(comm, [LENGTH] * comm.size, torch.float32, 1)
    except MPI.Exception as error:
        return f"cannot be set up ({str(error).splitlines()[0]})"
    try:
        return _run_self_test(remote, comm)
    except MPI.Exception as error:
        return f"fails ({str(error).splitlines()[0]})"
    finally:
        remote.free()


def _run_self_test(remote: RemoteMemoryByRma, comm: MPI.Intracomm) -> str:
    target = (comm.rank + (comm.size + 1) // 2) % comm.size
    written, back = torch.arange(float(LENGTH)), torch.zeros(LENGTH)
    remote.put(target, written[: LENGTH // 2])
    remote.add(target, written[LENGTH // 2 :], LENGTH // 2)
    remote.add(target, torch.ones(LENGTH))
    remote.get(target, back)
    remote.fetch_add(0, 0, comm.rank + 1)
    remote.barrier()
    found = _error_of(remote, back, written + 1, comm.size * (comm.size + 1) // 2)
    remote.barrier()  # in any case: no rank may free memory that another rank still reads
    return found


def _error_of(remote: RemoteMemoryByRma, back: torch.Tensor, expected: torch.Tensor, total: int) -> str:
    if not torch.equal(back, expected):
        return "reads back other numbers than were written"
    own = remote.view(remote.rank)
    if own is None or not torch.equal(own, expected):
        return "leaves other numbers in memory than were written"
    return "loses additions to a counter" if remote.fetch_add(0, 0) != total else ""
