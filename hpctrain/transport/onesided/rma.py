"""Expose memory by MPI's one-sided operations: passive targets, epochs that last as long as the memory.

Note: what is not one-sided. Within a node all is reached directly, as for ``ExposedByMessages``; the memory that a node
shares is exposed to other nodes by a window over all ranks, and numbers are read, written and added there. Counters of
other nodes are still asked for by messages: only their owner can change them as one act with its neighbours, because
a window over several nodes makes Open MPI let neighbours, too, wait for the owner. Rows of a matrix are read and
written as one operation, of a type that names them: it took a sixth of the time of one operation a row. They are added
to by a message, because Open MPI took 250 ms to accumulate 256 of them in that way, and 40 ms by the message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.transport.activity import waiting
from hpctrain.transport.mpi_calls import DTYPES, in_elements, memory
from hpctrain.transport.onesided.exposed import Operation, RowOperation
from hpctrain.transport.onesided.served import ExposedByMessages


class ExposedByRma(ExposedByMessages):
    """Hold memory in windows of MPI; made and freed by all ranks together."""

    name = "one-sided MPI"

    def __init__(self, comm: MPI.Intracomm, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        super().__init__(comm, lengths, dtype, words)
        self._window = MPI.WIN_NULL
        if any(self._comm.allgather(len(self._places) < comm.size)):
            own = self._pieces.own
            memory = MPI.buffer.fromaddress(own.data_ptr(), own.nbytes)
            self._window = MPI.Win.Create(memory, dtype.itemsize, comm=self._comm)
            self._window.Lock_all(MPI.MODE_NOCHECK)

    def _carry(self, operation: Operation, rank: int, values: Tensor, start: int) -> None:
        if self.recorder is not None:
            self.recorder.count(operation, values.nbytes)
        with waiting(f"{operation} in rank {rank}'s memory"):
            for spec in in_elements(values):
                place = (start, spec[1], DTYPES[self.dtype])
                if operation == "get":
                    self._window.Get(spec, rank, place)
                elif operation == "put":
                    self._window.Put(spec, rank, place)
                else:
                    self._window.Accumulate(spec, rank, place, MPI.SUM)
                start += spec[1]
            self._window.Flush(rank)

    def _carry_rows(self, operation: RowOperation, rank: int, values: Tensor, rows: Tensor, start: int) -> None:
        if operation == "add_rows":
            super()._carry_rows(operation, rank, values, rows, start)
            return
        if self.recorder is not None:
            self.recorder.count(operation, values.nbytes)
        kind = DTYPES[self.dtype].Create_indexed_block(values.shape[1], (rows * values.shape[1]).tolist())
        kind.Commit()
        with waiting(f"{operation} in rank {rank}'s memory"):
            carry = self._window.Get if operation == "get_rows" else self._window.Put
            carry((memory(values), values.numel(), DTYPES[self.dtype]), rank, (start, 1, kind))
            self._window.Flush(rank)
        kind.Free()

    def release(self) -> None:
        """Free what MPI can be asked with; the memory stays. Collective."""
        self._free_window()
        super().release()

    def _free_window(self) -> None:
        if self._window != MPI.WIN_NULL:
            self._window.Unlock_all()
            self._window.Free()

    def _give_back(self) -> None:
        self._free_window()
        super()._give_back()
